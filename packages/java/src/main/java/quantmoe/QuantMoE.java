package quantmoe;

import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.Locale;
import java.util.Map;

/** The operators of exported models, as native libraries that jars carry for each platform. */
public final class QuantMoE {
  private static final Map<String, String> paths = new HashMap<>();

  private QuantMoE() {}

  /**
   * The library of this machine's platform, for {@code SessionOptions.registerCustomOpLibrary}. The first call copies it
   * into a folder of its own in {@code java.io.tmpdir}, which goes when the virtual machine ends. Windows keeps the file,
   * as it is in use until then. On Android it is the library's name, which the app's linker finds.
   *
   * @return the same path in every call
   * @throws UnsupportedOperationException this jar has no library for the platform
   * @throws UncheckedIOException it cannot be copied
   */
  public static String libraryPath() {
    return libraryPath(Device.CPU);
  }

  /**
   * The library of this machine's platform for a device. The library for GPUs is in the artifact's jar of the classifier
   * {@code linux-x86_64-cuda}, or {@code windows-x86_64-cuda}.
   *
   * @param device where the model runs
   * @return the same absolute path in every call
   * @throws UnsupportedOperationException no jar has a library for the platform
   * @throws UncheckedIOException it cannot be copied
   */
  public static String libraryPath(Device device) {
    if (device == Device.CPU && "Dalvik".equals(System.getProperty("java.vm.name"))) return "libquantmoe_ort.so"; // Android
    if (device == Device.CPU) return pathOf("quantmoe_ort", "");
    return pathOf("quantmoe_ort_cuda", "; its jars of the classifiers linux-x86_64-cuda and windows-x86_64-cuda have one");
  }

  static synchronized String pathOf(String library, String wayOut) {
    if (paths.containsKey(library)) return paths.get(library);
    String os = System.getProperty("os.name").toLowerCase(Locale.ROOT), arch = System.getProperty("os.arch");
    boolean windows = os.startsWith("windows"), mac = os.startsWith("mac");
    String cpu = arch.equals("amd64") || arch.equals("x86_64") ? "x64" : arch.equals("aarch64") ? "arm64" : arch;
    String platform = (windows ? "win" : mac ? "osx" : os) + "-" + cpu;
    String name = windows ? library + ".dll" : "lib" + library + (mac ? ".dylib" : ".so");
    String resource = "quantmoe/native/" + platform + "/" + name;
    try (InputStream bytes = QuantMoE.class.getClassLoader().getResourceAsStream(resource)) { // of another jar, too
      if (bytes == null)
        throw new UnsupportedOperationException(
            "QuantMoE has no " + name + " for " + platform + " (os.name " + os + ", os.arch " + arch + ")" + wayOut);
      Path folder = Files.createTempDirectory("quantmoe"), file = folder.resolve(name);
      folder.toFile().deleteOnExit(); // in reverse order: the file first
      file.toFile().deleteOnExit();
      Files.copy(bytes, file);
      paths.put(library, file.toAbsolutePath().toString());
      return paths.get(library);
    } catch (IOException error) {
      throw new UncheckedIOException("QuantMoE's library: " + error.getMessage(), error);
    }
  }
}
