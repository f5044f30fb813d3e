import ai.onnxruntime.OrtLoggingLevel;
import ai.onnxruntime.OrtSession;
import java.util.*;
import java.util.stream.LongStream;
import quantmoe.*;

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
      long[] ids = LongStream.of(numbers).skip(1).toArray();
      try (Generator model = open(args[0], entries); TokenCache cache = new TokenCache(model)) {
        StringJoiner generated = new StringJoiner(" ");
        for (long id : cache.generate(ids, Options.greedy().maxNewTokens(numbers[0]))) generated.add(Long.toString(id));
        System.out.println(generated);
      }
    } catch (RuntimeException error) {
      System.err.println(error.getMessage());
      System.exit(1);
    }
  }

  static Generator open(String folder, Map<String, String> entries) {
    return new Generator(folder, options -> {
      // What ONNX Runtime logs is in its exceptions, except what the entries come to.
      options.setSessionLogLevel(
          entries.isEmpty() ? OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL : OrtLoggingLevel.ORT_LOGGING_LEVEL_INFO);
      for (var entry : entries.entrySet()) options.addConfigEntry(entry.getKey(), entry.getValue());
    });
  }

  static long number(String text) {
    if (!text.matches("[0-9]{1,18}")) throw new IllegalArgumentException('"' + text + "\": expected a number from 0");
    return Long.parseLong(text);
  }
}
