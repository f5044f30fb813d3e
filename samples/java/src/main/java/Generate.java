import ai.onnxruntime.OrtLoggingLevel;
import ai.onnxruntime.OrtSession;
import java.io.IOException;
import java.nio.file.*;
import java.util.*;
import java.util.stream.LongStream;
import quantmoe.*;

/**
 * Greedy decoding of an exported folder, up to COUNT token ids: Generate [--load-state FILE] [--save-state FILE] [--entry NAME=VALUE]
 * FOLDER COUNT ID... What was read and said may be loaded from a file and saved.
 */
public class Generate {
  public static void main(String[] args) {
    try {
      Map<String, String> entries = new HashMap<>(), files = new HashMap<>();
      for (; args.length > 1 && args[0].matches("--(entry|load-state|save-state)"); args = Arrays.copyOfRange(args, 2, args.length)) {
        String[] entry = args[1].split("=", 2);
        if (!args[0].equals("--entry")) files.put(args[0], args[1]);
        else if (entry.length == 2) entries.put(entry[0], entry[1]);
        else throw new IllegalArgumentException("--entry " + args[1] + ": expected NAME=VALUE");
      }
      if (args.length > 0 && args[0].startsWith("--"))
        throw new IllegalArgumentException(args[0] + ": expected --load-state FILE, --save-state FILE or --entry NAME=VALUE");
      if (args.length < 3)
        throw new IllegalArgumentException(
            "usage: Generate [--load-state FILE] [--save-state FILE] [--entry NAME=VALUE] FOLDER COUNT ID...");
      long[] numbers = Arrays.stream(args).skip(1).mapToLong(Generate::number).toArray();
      long[] ids = LongStream.of(numbers).skip(1).toArray();
      String load = files.get("--load-state"), save = files.get("--save-state");
      if (save != null && !Files.isDirectory(Path.of(save).toAbsolutePath().getParent()))
        throw new NoSuchFileException(save + ": its folder is missing");
      try (Generator model = open(args[0], entries);
          TokenCache cache = load == null ? new TokenCache(model, save != null) : TokenCache.load(model, Path.of(load), save != null)) {
        StringJoiner generated = new StringJoiner(" ");
        long[] rest = Arrays.copyOfRange(ids, cache.keep(ids), ids.length);
        for (long id : cache.generate(rest, Options.greedy().maxNewTokens(numbers[0]))) generated.add(Long.toString(id));
        if (numbers[0] > 0) System.out.println(generated); // before the file, which may fail
        if (save != null) cache.save(Path.of(save));
      }
    } catch (IOException | RuntimeException error) {
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
