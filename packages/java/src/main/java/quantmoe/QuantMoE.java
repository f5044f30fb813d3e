package quantmoe;

import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Locale;

/** The operators of exported models, as a native library that this jar carries for each platform. */
public final class QuantMoE {
  private static String path;

  private QuantMoE() {}

  /**
   * The library of this machine's platform, for {@code SessionOptions.registerCustomOpLibrary}. The first call copies it
   * into a folder of its own in {@code java.io.tmpdir}, which goes when the virtual machine ends. Windows keeps the file,
   * as it is in use until then.
   *
   * @return the same absolute path in every call
   * @throws UnsupportedOperationException this jar has no library for the platform
   * @throws UncheckedIOException it cannot be copied
   */
  public static synchronized String libraryPath() {
    if (path != null) return path;
    String os = System.getProperty("os.name").toLowerCase(Locale.ROOT), arch = System.getProperty("os.arch");
    boolean windows = os.startsWith("windows"), mac = os.startsWith("mac");
    String cpu = arch.equals("amd64") || arch.equals("x86_64") ? "x64" : arch.equals("aarch64") ? "arm64" : arch;
    String platform = (windows ? "win" : mac ? "osx" : os) + "-" + cpu;
    String name = windows ? "quantmoe_ort.dll" : mac ? "libquantmoe_ort.dylib" : "libquantmoe_ort.so";
    String resource = "native/" + platform + "/" + name;
    try (InputStream library = QuantMoE.class.getResourceAsStream(resource)) {
      if (library == null)
        throw new UnsupportedOperationException(
            "this jar of QuantMoE has no library for " + platform + " (os.name " + os + ", os.arch " + arch + ")");
      Path folder = Files.createTempDirectory("quantmoe"), file = folder.resolve(name);
      folder.toFile().deleteOnExit(); // in reverse order: the file first
      file.toFile().deleteOnExit();
      Files.copy(library, file);
      return path = file.toAbsolutePath().toString();
    } catch (IOException error) {
      throw new UncheckedIOException("QuantMoE's library: " + error.getMessage(), error);
    }
  }
}
