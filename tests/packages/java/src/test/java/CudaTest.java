import static org.junit.jupiter.api.Assertions.*;

import java.lang.reflect.InvocationTargetException;
import java.net.*;
import java.nio.file.*;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import quantmoe.*;

/** What a folder for GPUs needs is named where it is missing. No test has a GPU. */
class CudaTest {
  @TempDir Path temporary;

  @Test
  void aFolderForGpusIsRefusedOnTheCpu() {
    String folder = System.getProperty("cuda");
    var error = assertThrows(UnsupportedOperationException.class, () -> new Generator(folder));
    assertEquals(folder + ": exported for NVIDIA GPUs; open it with Device.CUDA, or export it with --target cpu", error.getMessage());
  }

  @Test
  void theClassifierIsNamed() {
    var error = assertThrows(UnsupportedOperationException.class, () -> new Generator(System.getProperty("cuda"), Device.CUDA));
    assertTrue(error.getMessage().startsWith("QuantMoE has no libquantmoe_ort_cuda.so for linux-"), error.getMessage());
    assertTrue(error.getMessage().endsWith("; its jars of the classifiers linux-x86_64-cuda and windows-x86_64-cuda have one"), error.getMessage());
  }

  @Test
  void theProviderIsNamed() throws Exception {
    Path library = temporary.resolve("quantmoe/native/linux-x64/libquantmoe_ort_cuda.so");
    Files.createDirectories(library.getParent());
    Files.createFile(library);
    ClassLoader others =
        new ClassLoader(getClass().getClassLoader()) {
          @Override
          protected Class<?> loadClass(String name, boolean resolve) throws ClassNotFoundException {
            if (name.startsWith("quantmoe.")) throw new ClassNotFoundException(name);
            return super.loadClass(name, resolve);
          }
        };
    URL jar = Generator.class.getProtectionDomain().getCodeSource().getLocation();
    try (var loader = new URLClassLoader(new URL[] {jar, temporary.toUri().toURL()}, others)) {
      Class<?> device = loader.loadClass("quantmoe.Device");
      var open = loader.loadClass("quantmoe.Generator").getConstructor(String.class, device);
      Object cuda = device.getMethod("valueOf", String.class).invoke(null, "CUDA");
      var error = assertThrows(InvocationTargetException.class, () -> open.newInstance(System.getProperty("cuda"), cuda));
      assertEquals(
          "this ONNX Runtime has no CUDA provider; take com.microsoft.onnxruntime:onnxruntime_gpu instead of onnxruntime",
          error.getCause().getMessage());
    }
  }
}
