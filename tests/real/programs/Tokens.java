import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.util.*;
import java.util.stream.*;
import quantmoe.*;

/** Tokens FOLDER FILE: what the package gives for the texts of a file of ids (tests/real/languages.py), a line each. */
public class Tokens {
  public static void main(String[] args) throws Exception {
    StringBuilder lines = new StringBuilder();
    try (TextTokenizer tokenizer = new TextTokenizer(args[0])) {
      for (String line : Files.readAllLines(Path.of(args[1]))) {
        String text = new String(Base64.getDecoder().decode(line.split("\t")[0]), StandardCharsets.UTF_8);
        long[] ids = tokenizer.encode(text, true);
        String whole = tokenizer.decode(ids, false);
        lines.append(
            String.join("\t", base64(text), joined(ids), joined(tokenizer.encode(text, false)), base64(whole),
                "" + wrong(tokenizer, ids, whole)) + "\n");
      }
    }
    System.out.print(lines);
  }

  /** Return at how many places a stream that begins there is not the rest of the text. */
  static int wrong(TextTokenizer tokenizer, long[] ids, String whole) {
    int wrong = 0;
    for (int cut = 0; cut <= ids.length; cut++) {
      TextStream stream = new TextStream(tokenizer, List.of(), Arrays.copyOf(ids, cut));
      StringBuilder text = new StringBuilder(tokenizer.decode(Arrays.copyOf(ids, cut), false).replaceAll("\uFFFD+\\z", ""));
      for (int i = cut; i < ids.length; i++) text.append(stream.push(ids[i]));
      if (!whole.equals(text + stream.end())) wrong++;
    }
    return wrong;
  }

  static String joined(long[] ids) {
    return LongStream.of(ids).mapToObj(Long::toString).collect(Collectors.joining(" "));
  }

  static String base64(String text) {
    return Base64.getEncoder().encodeToString(text.getBytes(StandardCharsets.UTF_8));
  }
}
