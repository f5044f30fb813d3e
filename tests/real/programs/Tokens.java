import ai.djl.huggingface.tokenizers.HuggingFaceTokenizer;
import java.io.*;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.util.*;
import java.util.stream.*;

/** Tokens FOLDER FILE: what the sample gives for the texts of a file of ids (tests/real/languages.py), a line each. */
public class Tokens {
  public static void main(String[] args) throws Exception {
    System.setProperty("ai.djl.offline", "true");
    StringBuilder lines = new StringBuilder();
    try (HuggingFaceTokenizer tokenizer = Text.tokenizer(args[0])) {
      for (String line : Files.readAllLines(Path.of(args[1]))) {
        String text = new String(Base64.getDecoder().decode(line.split("\t")[0]), StandardCharsets.UTF_8);
        long[] ids = tokenizer.encode(text, true, false).getIds();
        String whole = tokenizer.decode(ids, true);
        lines.append(
            String.join("\t", base64(text), joined(ids), joined(tokenizer.encode(text, false, false).getIds()), base64(whole),
                "" + wrong(tokenizer, ids, whole)) + "\n");
      }
    }
    System.out.print(lines);
  }

  /** At how many places a stream that begins there is not the rest of the text. */
  static int wrong(HuggingFaceTokenizer tokenizer, long[] ids, String whole) throws IOException {
    int wrong = 0;
    for (int cut = 0; cut <= ids.length; cut++) {
      ByteArrayOutputStream out = new ByteArrayOutputStream();
      var printer = new Text.Printer(tokenizer, Arrays.copyOf(ids, cut), new PrintStream(out, false, "UTF-8"));
      for (int i = cut; i < ids.length; i++) printer.test(ids[i]);
      printer.end();
      String before = tokenizer.decode(Arrays.copyOf(ids, cut), true).replaceAll("\uFFFD+\\z", "");
      if (!whole.equals(before + out.toString("UTF-8"))) wrong++;
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
