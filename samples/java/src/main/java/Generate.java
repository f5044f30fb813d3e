import ai.onnxruntime.*;
import java.nio.*;
import java.util.*;
import java.util.stream.LongStream;

/** Greedy decoding of an exported folder: Generate LIBRARY FOLDER COUNT ID... prints COUNT token ids. */
public class Generate {
  public static void main(String[] args) throws OrtException {
    if (args.length < 4) {
      System.err.println("usage: Generate LIBRARY FOLDER COUNT ID...");
      System.exit(2);
    }
    long[] ids = Arrays.stream(args).skip(3).mapToLong(Long::parseLong).toArray();
    OrtEnvironment env = OrtEnvironment.getEnvironment();
    OrtSession.SessionOptions options = new OrtSession.SessionOptions();
    options.registerCustomOpLibrary(args[0]);
    try (OrtSession session = env.createSession(args[1] + "/model.onnx", options)) {
      StringJoiner generated = new StringJoiner(" ");
      OrtSession.Result last = null;  // its present.* are the next step's past_key_values.*
      long past = 0;
      for (int step = 0; step < Integer.parseInt(args[2]); step++) {
        long total = past + ids.length;
        Map<String, OnnxTensor> inputs = new HashMap<>();
        for (NodeInfo input : session.getInputInfo().values()) {
          TensorInfo info = (TensorInfo) input.getInfo();
          inputs.put(input.getName(), switch (input.getName()) {
            case "input_ids" -> row(env, ids);
            case "position_ids" -> row(env, LongStream.range(past, total).toArray());
            case "attention_mask" -> row(env, LongStream.range(0, total).map(i -> 1).toArray());
            default -> last == null ? emptyCache(env, info)
                : (OnnxTensor) last.get(input.getName().replace("past_key_values", "present")).get();
          });
        }
        OrtSession.Result result = session.run(inputs);
        if (last != null) last.close();
        last = result;
        past = total;
        ids = new long[] {argmax((OnnxTensor) result.get("logits").get())};
        generated.add(Long.toString(ids[0]));
      }
      System.out.println(generated);
    }
  }

  static OnnxTensor row(OrtEnvironment env, long[] values) throws OrtException {
    return OnnxTensor.createTensor(env, LongBuffer.wrap(values), new long[] {1, values.length});
  }

  /** Batch 1, no past: every dynamic dimension after the first is the past length. */
  static OnnxTensor emptyCache(OrtEnvironment env, TensorInfo info) throws OrtException {
    long[] shape = info.getShape();
    for (int i = 0; i < shape.length; i++) shape[i] = shape[i] < 0 ? (i == 0 ? 1 : 0) : shape[i];
    return OnnxTensor.createTensor(env, ByteBuffer.allocateDirect(0), shape, info.type);
  }

  /** The best token at the last position of logits [1, sequence, vocabulary]. */
  static int argmax(OnnxTensor logits) {
    FloatBuffer values = logits.getFloatBuffer();
    int vocabulary = (int) logits.getInfo().getShape()[2], offset = values.limit() - vocabulary, best = 0;
    for (int i = 1; i < vocabulary; i++) if (values.get(offset + i) > values.get(offset + best)) best = i;
    return best;
  }
}
