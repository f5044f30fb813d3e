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
      Map<String, String> entries = new HashMap<>();
      for (; args.length > 1 && args[0].equals("--entry"); args = Arrays.copyOfRange(args, 2, args.length)) {
        String[] entry = args[1].split("=", 2);
        entries.put(entry[0], entry[entry.length - 1]);
      }
      if (args.length < 3) throw new IllegalArgumentException("usage: Generate [--entry NAME=VALUE] FOLDER COUNT ID...");
      long[] numbers = Arrays.stream(args).skip(1).mapToLong(Generate::number).toArray();
      OrtEnvironment env = OrtEnvironment.getEnvironment(OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR);
      try (OrtSession session = open(env, args[0], entries); OrtSession.RunOptions run = new OrtSession.RunOptions()) {
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
    return open(env, folder, Map.of());
  }

  /** With entries of the session, which are set before the library is registered. */
  static OrtSession open(OrtEnvironment env, String folder, Map<String, String> entries) throws OrtException {
    try (OrtSession.SessionOptions options = new OrtSession.SessionOptions()) {
      // What it logs is in its exceptions, but for what the entries come to.
      options.setSessionLogLevel(
          entries.isEmpty() ? OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL : OrtLoggingLevel.ORT_LOGGING_LEVEL_INFO);
      for (var entry : entries.entrySet()) options.addConfigEntry(entry.getKey(), entry.getValue());
      options.registerCustomOpLibrary(QuantMoE.libraryPath());
      return env.createSession(folder + "/model.onnx", options);
    }
  }

  /** One answer; {@link State#generate} has the rest. */
  static void generate(
      OrtEnvironment env, OrtSession session, OrtSession.RunOptions run, long count, long[] ids, LongPredicate more)
      throws OrtException {
    try (State state = new State(env, session, ids.length + count)) {
      state.generate(run, count, ids, more);
    }
  }

  /**
   * What a model has read and said. Tensors and results are native memory that Java does not count: a server that leaves
   * them open leaks it.
   */
  static class State implements AutoCloseable {
    final Map<String, String> metadata;
    private final OrtEnvironment env;
    private final OrtSession session;
    private final boolean shares;  // past and present are one buffer that each run writes in place
    private final long context, room;
    private final Map<String, OnnxTensor> cache;
    private OrtSession.Result last;  // owns a cache that grows after the first step
    private long past;
    private long[] unread = {};  // the last token, which no run has read

    /** Room for so many tokens, of prompts and answers together, but no more than the model's context. */
    State(OrtEnvironment env, OrtSession session, long tokens) throws OrtException {
      this.env = env;
      this.session = session;
      metadata = session.getMetadata().getCustomMetadata();
      shares = "true".equals(metadata.get("past_present_share_buffer"));
      context = Long.parseLong(metadata.getOrDefault("context_length", "" + Long.MAX_VALUE));
      room = Math.min(tokens, context);
      cache = cache(shares ? room : 0);
    }

    /**
     * Reads ids after all that was read and said before, hands over each token of the answer as it comes, and ends where
     * that returns false. run.setTerminate(true), of any thread, ends it within a step, by an OrtException; after it a
     * state is of no more use.
     */
    void generate(OrtSession.RunOptions run, long count, long[] ids, LongPredicate more) throws OrtException {
      List<String> stop = List.of(metadata.getOrDefault("eos_token_id", "").split(","));
      ids = LongStream.concat(LongStream.of(unread), LongStream.of(ids)).toArray();
      if (ids.length == 0) throw new IllegalArgumentException("the prompt has no tokens");
      if (count > 0 && past + ids.length >= room)
        throw new IllegalArgumentException(
            (past + ids.length) + " tokens and 1 for the answer do not fit into "
                + (room < context ? "a cache of " : "the model's context of ") + room + " tokens");
      count = Math.min(count, room - past - ids.length);
      while (count-- > 0) {
        step(run, ids);
        ids = unread = new long[] {best((OnnxTensor) last.get("logits").get())};
        boolean ends = stop.contains(Long.toString(ids[0]));
        if (ends) unread = new long[0];  // what follows an answer begins with it
        if (!more.test(ids[0]) || ends) break;
      }
    }

    private void step(OrtSession.RunOptions run, long[] ids) throws OrtException {
      long total = past + ids.length;
      try (OnnxTensor inputIds = row(LongStream.of(ids));
          OnnxTensor mask = row(LongStream.range(0, total).map(i -> 1));
          OnnxTensor positions = row(LongStream.range(past, total))) {
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
    }

    @Override
    public void close() {
      if (last != null) last.close();
      if (last == null || shares) OnnxValue.close(cache);
    }

    private static String present(String past) {
      return past.replace("past_key_values", "present");
    }

    private OnnxTensor row(LongStream values) throws OrtException {
      return OnnxTensor.createTensor(env, new long[][] {values.toArray()});
    }

    /** Batch 1; every dynamic dimension of a cache input after the first is its length. */
    private Map<String, OnnxTensor> cache(long length) throws OrtException {
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
