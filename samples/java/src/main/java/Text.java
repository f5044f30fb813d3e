import java.io.*;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.*;
import quantmoe.*;

/**
 * Text FOLDER COUNT TEXT goes on from a text, for up to COUNT tokens. Text FOLDER COUNT is a conversation: each line that
 * is typed gets an answer of up to COUNT tokens. Both print tokens as they come, until Enter is pressed.
 */
public class Text {
  private static final BlockingQueue<String> messages = new LinkedBlockingQueue<>();
  private static Answer<String> answer; // what Enter ends
  private static boolean early; // Enter was pressed before the answer began

  public static void main(String[] args) {
    PrintStream out = new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);
    try {
      if (args.length < 2 || args.length > 3) throw new IllegalArgumentException("usage: Text FOLDER COUNT [TEXT]");
      Options options = Options.greedy().maxNewTokens(Generate.number(args[1]));
      boolean talks = args.length == 2;
      try (Generator model = Generate.open(args[0], Map.of()); Chat chat = new Chat(model, null, !talks)) {
        if (talks && !model.metadata().containsKey("chat.begin") && !model.metadata().containsKey("no_chat"))
          throw new IllegalArgumentException("the model has no chat template; usage: Text FOLDER COUNT TEXT");
        read();
        String message = talks ? messages.take() : args[2];
        for (; !message.isEmpty(); message = talks ? messages.take() : "") say(chat.reply(message, options), out);
        if (!talks && args[2].isEmpty()) chat.reply("", options); // says what is wrong
      }
    } catch (RuntimeException | InterruptedException error) {
      System.err.println(error.getMessage());
      System.exit(1);
    }
  }

  private static void say(Answer<String> pieces, PrintStream out) {
    begin(pieces);
    try {
      for (String piece : pieces) out.print(piece);
    } catch (CancellationException enter) {
      // The conversation goes on.
    }
    out.println();
  }

  private static synchronized void begin(Answer<String> begun) {
    answer = begun;
    if (early) answer.cancel();
    early = false;
  }

  private static synchronized void enter() {
    if (answer == null) early = true;
    else answer.cancel();
  }

  /** Take each line that is typed as a message, an empty line to end an answer. */
  private static void read() {
    BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    Thread thread = new Thread(() -> {
      try {
        for (String line; (line = in.readLine()) != null; )
          if (line.isEmpty()) enter();
          else messages.add(line);
      } catch (IOException ended) {
        // No more messages.
      }
      messages.add("");
    });
    thread.setDaemon(true);
    thread.start();
  }
}
