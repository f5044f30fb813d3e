//! The models and folders that tests use.
#![allow(dead_code)] // each test file has its own copy

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use quantmoe::{Error, Generator, Options, Sampling, TokenCache};

pub const TURNS: [(&str, &str); 5] = [
    ("chat.begin", "Q: "),
    ("chat.reply", "\nA:"),
    ("chat.next", "\nQ: "),
    ("chat.system", "S: "),
    ("chat.system_end", "\nQ: "),
];

/// Return the folder of the plain or the hybrid model.
pub fn folder(name: &str) -> PathBuf {
    let name = if name == "hybrid" { "QUANTMOE_HYBRID" } else { "QUANTMOE_MODEL" };
    PathBuf::from(std::env::var_os(name).unwrap_or_else(|| panic!("{name} names no exported folder")))
}

pub fn model(name: &str) -> Generator {
    Generator::open(folder(name)).unwrap()
}

pub fn greedy(max_new_tokens: usize) -> Options {
    Options { max_new_tokens, sampling: Some(Sampling::greedy()), ..Options::default() }
}

/// Return tokens after a prompt, from an empty cache.
pub fn fresh(model: &Generator, ids: &[i64], count: usize) -> Vec<i64> {
    all(TokenCache::new(model).unwrap().generate(ids, &greedy(count)).unwrap())
}

pub fn all<T>(items: impl Iterator<Item = Result<T, Error>>) -> Vec<T> {
    items.collect::<Result<_, _>>().unwrap()
}

/// A temporary folder with a copy of a model.
pub struct Copy(pub PathBuf);

impl Copy {
    /// Make a copy of a model with more metadata. A ModelProto's field 14 is a list of entries: more of them may stand at the file's end.
    pub fn new(folder: &Path, metadata: &[(&str, &str)]) -> Self {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let made = std::env::temp_dir().join(format!(
            "quantmoe-{}-{}",
            std::process::id(),
            MADE.fetch_add(1, Ordering::Relaxed)
        ));
        fs::create_dir(&made).unwrap();
        for file in fs::read_dir(folder).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), made.join(file.file_name())).unwrap();
        }
        let mut model = fs::OpenOptions::new().append(true).open(made.join("model.onnx")).unwrap();
        for (key, value) in metadata {
            let field = |tag: u8, text: &str| [&[tag, text.len() as u8], text.as_bytes()].concat();
            let both = [field(0x0a, key), field(0x12, value)].concat();
            model
                .write_all(&[&[0x72, (both.len() & 127 | 128) as u8, (both.len() >> 7) as u8], &both[..]].concat())
                .unwrap();
        }
        Self(made)
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
