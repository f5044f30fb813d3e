import static org.junit.jupiter.api.Assertions.*;

import ai.onnxruntime.*;
import java.nio.file.*;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import quantmoe.QuantMoE;

class LibraryTest {
  @Test
  void aSessionOfAnExportedFolderNeedsNothingElse() throws Exception {
    String library = QuantMoE.libraryPath();
    assertTrue(Path.of(library).isAbsolute() && Files.size(Path.of(library)) > 100_000, library);
    assertEquals(library, QuantMoE.libraryPath());
    String model = System.getProperty("model") + "/model.onnx";
    OrtEnvironment env = OrtEnvironment.getEnvironment();
    try (var options = new OrtSession.SessionOptions()) {
      assertThrows(OrtException.class, () -> env.createSession(model, options)); // unknown operators
      options.registerCustomOpLibrary(library);
      try (OrtSession session = env.createSession(model, options)) {
        assertTrue(session.getOutputNames().contains("logits"));
      }
    }
  }

  @Test
  void androidFindsTheLibraryOfTheApp() {
    String vm = System.setProperty("java.vm.name", "Dalvik");
    try {
      assertEquals("libquantmoe_ort.so", QuantMoE.libraryPath());
    } finally {
      System.setProperty("java.vm.name", vm);
    }
  }

  @ParameterizedTest
  @CsvSource({"Linux,s390x,linux-s390x", "Windows 11,aarch64,win-arm64"})
  void aPlatformThatTheJarLacksIsNamed(String os, String cpu, String platform) throws Exception {
    // A class loader of its own, as the first call decides.
    String name = System.setProperty("os.name", os), arch = System.setProperty("os.arch", cpu);
    var jar = QuantMoE.class.getProtectionDomain().getCodeSource().getLocation();
    try (var loader = new java.net.URLClassLoader(new java.net.URL[] {jar}, null)) {
      var call = loader.loadClass("quantmoe.QuantMoE").getMethod("libraryPath");
      var error = assertThrows(java.lang.reflect.InvocationTargetException.class, () -> call.invoke(null));
      assertInstanceOf(UnsupportedOperationException.class, error.getCause());
      assertTrue(error.getCause().getMessage().contains(" for " + platform + " "), error.getCause().getMessage());
    } finally {
      System.setProperty("os.name", name);
      System.setProperty("os.arch", arch);
    }
  }
}
