package quantmoe;

import java.util.*;

/** The text of tokens as they come: whole characters, and never the begin of a stop string. */
public final class TextStream {
  private final TextTokenizer tokenizer;
  private final List<String> stop = new ArrayList<>();
  private long[] ids;
  private String held = "";
  private int begin; // the tokens from `begin` are decoded
  private int given; // the text of the first `given` tokens ends with a whole character
  private int shown; // characters of the decoded text that were given
  private boolean stopped;

  /**
   * Begin after some tokens. Their text is not given, except a last character that they only begin.
   *
   * @param tokenizer the tokenizer of the tokens
   * @param stop strings that end the text; they are not part of it
   * @param after tokens before the first
   */
  public TextStream(TextTokenizer tokenizer, List<String> stop, long[] after) {
    this.tokenizer = tokenizer;
    for (String text : stop) if (!text.isEmpty()) this.stop.add(text);
    ids = after.clone();
    String text = decoded();
    shown = whole(text);
    given = shown == text.length() ? ids.length : 0;
  }

  /** @return whether a stop string came; nothing after it is given */
  public boolean stopped() {
    return stopped;
  }

  /**
   * Add a token.
   *
   * @param id the token
   * @return the text that it completes; empty while a character or a stop string may go on
   */
  public String push(long id) {
    ids = Arrays.copyOf(ids, ids.length + 1);
    ids[ids.length - 1] = id;
    String text = decoded();
    int end = whole(text);
    if (end <= shown) return "";
    String found = text.substring(shown, end);
    shown = end;
    if (end == text.length()) {
      begin = given; // a token's text depends on the tokens right before it, in decoders of words
      given = ids.length;
      shown = decoded().length();
    }
    return release(found);
  }

  /** @return the text held back, after the last token */
  public String end() {
    String text = decoded(), found = release(text.substring(Math.min(shown, text.length())));
    return stopped ? found : found + held;
  }

  private String decoded() {
    return tokenizer.decode(Arrays.copyOfRange(ids, begin, ids.length), false);
  }

  /** Return how long a text is without a last character whose other bytes may come. */
  private static int whole(String text) {
    int end = text.length();
    while (end > 0 && text.charAt(end - 1) == '\uFFFD') end--;
    return end;
  }

  private String release(String found) {
    if (stopped) return "";
    String text = held + found;
    held = "";
    OptionalInt at = stop.stream().mapToInt(text::indexOf).filter(index -> index >= 0).min();
    if (at.isPresent()) {
      stopped = true;
      return text.substring(0, at.getAsInt());
    }
    int shownNow = text.length() - stop.stream().mapToInt(end -> begun(text, end)).max().orElse(0);
    held = text.substring(shownNow);
    return text.substring(0, shownNow);
  }

  /** Return how many characters at a text's end begin the stop string. */
  private static int begun(String text, String end) {
    int length = Math.min(text.length(), end.length() - 1);
    while (length > 0 && !text.endsWith(end.substring(0, length))) length--;
    return length;
  }
}
