import ai.djl.huggingface.tokenizers.HuggingFaceTokenizer;
import ai.onnxruntime.*;
import java.io.*;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.LongPredicate;

/** Goes on from a text: Text FOLDER COUNT TEXT prints up to COUNT tokens as they come. Enter ends it. */
public class Text {
  public static void main(String[] args) {
    System.setProperty("ai.djl.offline", "true");  // the tokenizer is in its jar; without this DJL asks and tells the network
    PrintStream out = new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);
    AtomicBoolean cancelled = new AtomicBoolean();
    try {
      if (args.length != 3) throw new IllegalArgumentException("usage: Text FOLDER COUNT TEXT");
      long count = Generate.number(args[1]);
      OrtEnvironment env = OrtEnvironment.getEnvironment(OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR);
      try (OrtSession session = Generate.open(env, args[0]);
          HuggingFaceTokenizer tokenizer = HuggingFaceTokenizer.newInstance(Path.of(args[0], "tokenizer.json"));
          OrtSession.RunOptions run = new OrtSession.RunOptions()) {
        Thread enter = new Thread(() -> {
          try {
            if (System.in.read() < 0) return;
            cancelled.set(true);
            run.setTerminate(true);
          } catch (IOException | OrtException | IllegalStateException ended) {
          }
        });
        enter.setDaemon(true);
        enter.start();
        long[] prompt = tokenizer.encode(args[2], true, false).getIds();
        Generate.generate(env, session, run, count, prompt, new Printer(tokenizer, prompt, out));
      }
    } catch (OrtException | IOException | RuntimeException error) {
      if (!cancelled.get()) {
        System.err.println(error.getMessage());
        System.exit(1);
      }
    }
    out.println();
  }

  /** Prints what each token adds: a token may be a part of a character, and what it adds may depend on those before. */
  static class Printer implements LongPredicate {
    private final HuggingFaceTokenizer tokenizer;
    private final PrintStream out;
    private long[] ids;  // of them the text of the first `printed` is out, and what follows `from` is enough to tell more
    private int from, printed;

    Printer(HuggingFaceTokenizer tokenizer, long[] prompt, PrintStream out) {
      this.tokenizer = tokenizer;
      this.ids = prompt;
      this.printed = prompt.length;
      this.out = out;
    }

    @Override
    public boolean test(long id) {
      ids = Arrays.copyOf(ids, ids.length + 1);
      ids[ids.length - 1] = id;
      String before = tokenizer.decode(Arrays.copyOfRange(ids, from, printed), true);
      String after = tokenizer.decode(Arrays.copyOfRange(ids, from, ids.length), true);
      if (after.endsWith("\uFFFD")) return true;  // a character of which more is to come
      out.print(after.substring(before.length()));
      out.flush();
      from = printed;
      printed = ids.length;
      return true;
    }
  }
}
