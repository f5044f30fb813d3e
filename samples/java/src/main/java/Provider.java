import ai.onnxruntime.*;
import java.nio.*;
import java.nio.file.*;
import java.util.*;
import java.util.stream.*;
import quantmoe.QuantMoE;

/**
 * A model of another tool in QuantMoE's execution provider: Provider MODEL prints the first numbers of each output. The inputs
 * are 1 everywhere, and so is the size of each free dimension; nothing is past.
 */
public class Provider {
  public static void main(String[] args) {
    try {
      if (args.length != 1) throw new IllegalArgumentException("usage: Provider MODEL");
      if (Files.isDirectory(Path.of(args[0])))
        throw new IllegalArgumentException(args[0] + " is a folder, expected a model's .onnx file");
      OrtEnvironment env = OrtEnvironment.getEnvironment(OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR);
      try (OrtSession session = open(env, args[0])) {
        Map<String, OnnxTensor> inputs = new HashMap<>();
        for (NodeInfo input : session.getInputInfo().values()) inputs.put(input.getName(), ones(env, input));
        try (OrtSession.Result outputs = session.run(inputs)) {
          for (Map.Entry<String, OnnxValue> output : outputs)
            System.out.println(output.getKey() + ": " + text(((OnnxTensor) output.getValue()).getFloatBuffer()));
        }
        OnnxValue.close(inputs);
      }
    } catch (OrtException | IllegalArgumentException error) {
      System.err.println(error.getMessage());
      System.exit(1);
    }
  }

  static OrtSession open(OrtEnvironment env, String model) throws OrtException {
    env.registerExecutionProviderLibrary("QuantMoE", QuantMoE.libraryPath());  // once in a process
    List<OrtEpDevice> devices = env.getEpDevices().stream().filter(d -> d.getEpName().equals("QuantMoE")).toList();
    try (OrtSession.SessionOptions options = new OrtSession.SessionOptions()) {
      options.setSessionLogLevel(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL);  // what it logs is in its exceptions
      options.addExecutionProvider(devices, Map.of("activations", "auto"));  // docs/guides/qmoe-models.md has the options
      return env.createSession(model, options);
    }
  }

  static OnnxTensor ones(OrtEnvironment env, NodeInfo input) throws OrtException {
    TensorInfo info = (TensorInfo) input.getInfo();
    long[] shape = info.getShape();
    for (int i = 0; i < shape.length; ++i)
      if (shape[i] < 0) shape[i] = info.getDimensionNames()[i].matches("[^+]*past[^+]*") ? 0 : 1;
    int count = Math.toIntExact(LongStream.of(shape).reduce(1, Math::multiplyExact));
    ByteBuffer numbers = ByteBuffer.allocateDirect(count * info.type.size).order(ByteOrder.nativeOrder());
    while (numbers.hasRemaining())
      switch (info.type) {
        case FLOAT -> numbers.putFloat(1);
        case FLOAT16 -> numbers.putShort((short) 0x3c00);
        case INT64 -> numbers.putLong(1);
        default -> throw new IllegalArgumentException(
            "input " + input.getName() + " is " + info.type + ", expected one of FLOAT, FLOAT16, INT64");
      }
    return OnnxTensor.createTensor(env, numbers.rewind(), shape, info.type);
  }

  static String text(FloatBuffer numbers) {
    return IntStream.range(0, Math.min(8, numbers.limit()))
        .mapToObj(i -> String.format(Locale.ROOT, "%.6f", numbers.get(i))).collect(Collectors.joining(" "));
  }
}
