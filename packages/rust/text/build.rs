//! Gives the shared library its name, by which programs find it, and segments for pages of 16 KB.

fn main() {
    match std::env::var("CARGO_CFG_TARGET_OS").as_deref() {
        Ok("linux") => println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libquantmoe_text.so,-z,max-page-size=16384"),
        Ok("macos") => ["-install_name", "@rpath/libquantmoe_text.dylib"]
            .iter()
            .for_each(|argument| println!("cargo:rustc-cdylib-link-arg={argument}")),
        _ => {}
    }
}
