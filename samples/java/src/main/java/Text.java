import ai.djl.huggingface.tokenizers.HuggingFaceTokenizer;
import ai.onnxruntime.*;
import java.io.*;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.Map;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.LongPredicate;

/**
 * Text FOLDER COUNT TEXT goes on from a text, for up to COUNT tokens. Text FOLDER COUNT is a conversation: each line that
 * is typed gets an answer of up to COUNT tokens. Both print tokens as they come, until Enter is pressed.
 */
public class Text {
  private static final long ROOM = 4096;  // tokens of a conversation: its cache is allocated as it begins

  public static void main(String[] args) {
    System.setProperty("ai.djl.offline", "true");  // the tokenizer is in its jar; without this DJL asks and tells the network
    PrintStream out = new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);
    try {
      if (args.length < 2 || args.length > 3) throw new IllegalArgumentException("usage: Text FOLDER COUNT [TEXT]");
      long count = Generate.number(args[1]);
      OrtEnvironment env = OrtEnvironment.getEnvironment(OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR);
      try (OrtSession session = Generate.open(env, args[0]);
          HuggingFaceTokenizer tokenizer = tokenizer(args[0]);
          OrtSession.RunOptions run = new OrtSession.RunOptions()) {
        if (args.length == 3) goOn(env, session, run, tokenizer, count, args[2], out);
        else talk(env, session, run, tokenizer, count, out);
      }
    } catch (OrtException | IOException | RuntimeException error) {
      System.err.println(error.getMessage());
      System.exit(1);
    }
  }

  /** Every token of a text, as transformers gives them: DJL cuts at 512 by default, tokenizer.json at its own length, or pads. */
  static HuggingFaceTokenizer tokenizer(String folder) throws IOException {
    Path file = Path.of(folder, "tokenizer.json");
    return HuggingFaceTokenizer.newInstance(file, Map.of("truncation", "false", "padding", "false"));
  }

  private static void goOn(
      OrtEnvironment env, OrtSession session, OrtSession.RunOptions run, HuggingFaceTokenizer tokenizer, long count,
      String text, PrintStream out) throws OrtException {
    AtomicBoolean cancelled = new AtomicBoolean();
    lines(line -> {
      if (line == null) return;
      cancelled.set(true);
      run.setTerminate(true);
    });
    long[] prompt = tokenizer.encode(text, true, false).getIds();
    Printer printer = new Printer(tokenizer, prompt, out);
    try {
      Generate.generate(env, session, run, count, prompt, printer);
    } catch (OrtException error) {
      if (!cancelled.get()) throw error;
    }
    printer.end();
    out.println();
  }

  /** What a message is framed with is the chat template's, as the model's metadata has it: no Jinja is needed. */
  private static void talk(
      OrtEnvironment env, OrtSession session, OrtSession.RunOptions run, HuggingFaceTokenizer tokenizer, long count,
      PrintStream out) throws OrtException {
    BlockingQueue<String> messages = new LinkedBlockingQueue<>();
    AtomicBoolean enter = new AtomicBoolean();
    lines(line -> {
      if (line == null) messages.add("");  // no more
      else if (line.isEmpty()) enter.set(true);
      else messages.add(line);
    });
    try (Generate.State state = new Generate.State(env, session, ROOM)) {
      Map<String, String> around = state.metadata;
      if (!around.containsKey("chat.begin"))
        throw new IllegalArgumentException("the model has no turns of a chat template; usage: Text FOLDER COUNT TEXT");
      String before = around.get("chat.begin");
      for (String message; !(message = take(messages)).isEmpty(); before = around.get("chat.next")) {
        enter.set(false);
        long[] ids = tokenizer.encode(before + message + around.get("chat.reply"), false, false).getIds();
        Printer printer = new Printer(tokenizer, ids, out);
        state.generate(run, count, ids, id -> printer.test(id) && !enter.get());
        printer.end();
        out.println();
      }
    }
  }

  private static String take(BlockingQueue<String> messages) {
    try {
      return messages.take();
    } catch (InterruptedException interrupted) {
      return "";
    }
  }

  private interface Line {
    void read(String line) throws OrtException;
  }

  /** Hands over each line that is typed, and null at the end of the input. */
  private static void lines(Line each) {
    BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    Thread thread = new Thread(() -> {
      try {
        for (String line; (line = in.readLine()) != null; ) each.read(line);
        each.read(null);
      } catch (IOException | OrtException | IllegalStateException ended) {
      }
    });
    thread.setDaemon(true);
    thread.start();
  }

  /** Prints what each token adds: a token may be a part of a character, and what it adds may depend on those before. */
  static class Printer implements LongPredicate {
    private final HuggingFaceTokenizer tokenizer;
    private final PrintStream out;
    private long[] ids;  // decoded are those from `from` on; the text of the first `given` ends with a whole character
    private int from, given, shown;  // characters of the decoded text that are out

    Printer(HuggingFaceTokenizer tokenizer, long[] prompt, PrintStream out) {
      this.tokenizer = tokenizer;
      this.ids = prompt;
      this.out = out;
      String text = text();
      shown = whole(text);
      given = shown == text.length() ? prompt.length : 0;
    }

    @Override
    public boolean test(long id) {
      ids = Arrays.copyOf(ids, ids.length + 1);
      ids[ids.length - 1] = id;
      String text = text();
      int end = whole(text);
      if (end <= shown) return true;
      out.print(text.substring(shown, end));
      out.flush();
      shown = end;
      if (end == text.length()) {
        from = given;
        given = ids.length;
        shown = text().length();
      }
      return true;
    }

    /** Prints what is left where the last character is not complete. */
    void end() {
      String text = text();
      out.print(text.substring(Math.min(shown, text.length())));
      out.flush();
    }

    private String text() {
      return tokenizer.decode(Arrays.copyOfRange(ids, from, ids.length), true);
    }

    /** How long a text is without a last character of which more may come. */
    private static int whole(String text) {
      int end = text.length();
      while (end > 0 && text.charAt(end - 1) == '\uFFFD') end--;
      return end;
    }
  }
}
