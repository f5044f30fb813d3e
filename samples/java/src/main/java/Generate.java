import ai.onnxruntime.*;
import java.nio.*;
import java.util.*;
import java.util.function.LongPredicate;
import java.util.stream.LongStream;
import quantmoe.QuantMoE;

/** Greedy decoding of an exported folder: Generate FOLDER COUNT ID... prints up to COUNT token ids. */
public class Generate {
  public static void main(String[] args) {
    try {
      if (args.length < 3) throw new IllegalArgumentException("usage: Generate FOLDER COUNT ID...");
      long[] numbers = Arrays.stream(args).skip(1).mapToLong(Generate::number).toArray();
      OrtEnvironment env = OrtEnvironment.getEnvironment(OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR);
      try (OrtSession session = open(env, args[0]); OrtSession.RunOptions run = new OrtSession.RunOptions()) {
        StringJoiner generated = new StringJoiner(" ");
        long[] ids = Arrays.copyOfRange(numbers, 1, numbers.length);
        generate(env, session, run, numbers[0], ids, id -> generated.add(Long.toString(id)) != null);
        System.out.println(generated);
      }
    } catch (OrtException | IllegalArgumentException error) {
      System.err.println(error.getMessage());
      System.exit(1);
    }
  }

  static OrtSession open(OrtEnvironment env, String folder) throws OrtException {
    try (OrtSession.SessionOptions options = new OrtSession.SessionOptions()) {
      options.setSessionLogLevel(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL);  // what it logs is in its exceptions
      options.registerCustomOpLibrary(QuantMoE.libraryPath());
      return env.createSession(folder + "/model.onnx", options);
    }
  }

  /**
   * Hands over each token as it comes and ends where that returns false. run.setTerminate(true), of any thread, ends it
   * within a step, by an OrtException. Tensors and results are native memory that Java does not count: a server that
   * leaves them open leaks it.
   */
  static void generate(
      OrtEnvironment env, OrtSession session, OrtSession.RunOptions run, long count, long[] ids, LongPredicate more)
      throws OrtException {
    Map<String, String> metadata = session.getMetadata().getCustomMetadata();
    List<String> stop = List.of(metadata.getOrDefault("eos_token_id", "").split(","));
    long context = Long.parseLong(metadata.getOrDefault("context_length", "" + Long.MAX_VALUE));
    if (ids.length >= context)
      throw new IllegalArgumentException(
          "a prompt of " + ids.length + " tokens leaves no room in the model's context of " + context);
    count = Math.min(count, context - ids.length);

    // Past and present are one buffer that each run writes in place, if the model takes that. Otherwise present is the
    // longer past of the next run.
    boolean shares = "true".equals(metadata.get("past_present_share_buffer"));
    Map<String, OnnxTensor> cache = cache(env, session, shares ? ids.length + count : 0);
    OrtSession.Result last = null;  // owns a cache that grows after the first step
    try {
      for (long past = 0; count-- > 0; ) {
        long total = past + ids.length;
        try (OnnxTensor inputIds = row(env, LongStream.of(ids));
            OnnxTensor mask = row(env, LongStream.range(0, total).map(i -> 1));
            OnnxTensor positions = row(env, LongStream.range(past, total))) {
          Map<String, OnnxTensor> inputs = new HashMap<>(cache), pinned = new HashMap<>();
          inputs.putAll(Map.of("input_ids", inputIds, "attention_mask", mask, "position_ids", positions));
          if (shares) cache.forEach((name, tensor) -> pinned.put(present(name), tensor));
          Set<String> outputs = new HashSet<>(session.getOutputNames());
          outputs.removeAll(pinned.keySet());
          OrtSession.Result result = session.run(inputs, outputs, pinned, run);
          if (last != null) last.close();
          else if (!shares) OnnxValue.close(cache);
          last = result;
        }
        if (!shares)
          for (var entry : cache.entrySet()) entry.setValue((OnnxTensor) last.get(present(entry.getKey())).get());
        past = total;
        ids = new long[] {best((OnnxTensor) last.get("logits").get())};
        if (!more.test(ids[0]) || stop.contains(Long.toString(ids[0]))) break;
      }
    } finally {
      if (last != null) last.close();
      if (last == null || shares) OnnxValue.close(cache);
    }
  }

  static String present(String past) {
    return past.replace("past_key_values", "present");
  }

  static OnnxTensor row(OrtEnvironment env, LongStream values) throws OrtException {
    return OnnxTensor.createTensor(env, new long[][] {values.toArray()});
  }

  /** Batch 1; every dynamic dimension of a cache input after the first is its length. */
  static Map<String, OnnxTensor> cache(OrtEnvironment env, OrtSession session, long length) throws OrtException {
    Map<String, OnnxTensor> cache = new HashMap<>();
    for (NodeInfo input : session.getInputInfo().values()) {
      if (!input.getName().startsWith("past_key_values")) continue;
      TensorInfo info = (TensorInfo) input.getInfo();
      long[] shape = info.getShape();
      for (int i = 0; i < shape.length; i++) shape[i] = shape[i] < 0 ? (i == 0 ? 1 : length) : shape[i];
      long bytes = LongStream.of(shape).reduce(info.type.size, Math::multiplyExact);
      ByteBuffer buffer = ByteBuffer.allocateDirect(Math.toIntExact(bytes)).order(ByteOrder.nativeOrder());
      cache.put(input.getName(), OnnxTensor.createTensor(env, buffer, shape, info.type));
    }
    return cache;
  }

  /** The best token at the last position of logits [1, sequence, vocabulary]. */
  static int best(OnnxTensor logits) {
    FloatBuffer values = logits.getFloatBuffer();
    int vocabulary = (int) logits.getInfo().getShape()[2], offset = values.limit() - vocabulary, best = 0;
    for (int i = 0; i < vocabulary; i++) {
      if (!Float.isFinite(values.get(offset + i))) throw new IllegalArgumentException("logits are not finite");
      if (values.get(offset + i) > values.get(offset + best)) best = i;
    }
    return best;
  }

  static long number(String text) {
    if (!text.matches("[0-9]{1,18}")) throw new IllegalArgumentException('"' + text + "\": expected a number from 0");
    return Long.parseLong(text);
  }
}
