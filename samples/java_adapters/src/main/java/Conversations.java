import java.util.*;
import quantmoe.*;

/**
 * Answers requests that repeat their conversation. The last conversations stay open, so that a request runs only what is new. Any number
 * of threads may use it.
 */
final class Conversations implements AutoCloseable {
  /** An answer that is being generated. Close it in any case. */
  final class Running implements AutoCloseable {
    final Answer<String> pieces;
    private final Chat chat;
    private final List<String> texts;
    private final StringBuilder said = new StringBuilder();
    private boolean over;

    private Running(Chat chat, List<String> texts, Answer<String> pieces) {
      this.chat = chat;
      this.texts = texts;
      this.pieces = pieces;
    }

    /** Return the next piece; null: the answer is over. */
    String next() {
      over = !pieces.hasNext();
      if (over) return null;
      String piece = pieces.next();
      said.append(piece);
      return piece;
    }

    String rest() {
      while (next() != null) {}
      return said.toString();
    }

    ReplyInfo info() {
      return chat.last();
    }

    @Override
    public void close() {
      texts.add(said.toString());
      if (over) keep(chat, texts);
      else chat.close();
    }
  }

  private final Generator model;
  private final int most; // idle conversations
  private final Map<List<String>, Chat> idle = new LinkedHashMap<>();
  private boolean closed;

  Conversations(Generator model, int most) {
    this.model = model;
    this.most = most;
  }

  Generator model() {
    return model;
  }

  /**
   * Begin the answer to the last message.
   *
   * @param system a system prompt; null: none
   * @param texts messages and their answers in turn, from the first message to the last one
   */
  Running begin(String system, List<String> texts, Options options) {
    if (texts.size() % 2 == 0) throw new IllegalArgumentException("the last message is not the user's, expected a message to answer");
    List<String> before = new ArrayList<>(List.of(system == null ? "" : system));
    before.addAll(texts.subList(0, texts.size() - 1));
    Chat chat = take(before);
    if (chat == null) {
      chat = new Chat(model, system, false);
      for (int i = 0; i + 1 < texts.size(); i += 2) chat.add(texts.get(i), texts.get(i + 1));
    }
    String message = texts.get(texts.size() - 1);
    before.add(message);
    try {
      return new Running(chat, before, chat.reply(message, options));
    } catch (RuntimeException error) {
      chat.close();
      throw error;
    }
  }

  private synchronized Chat take(List<String> texts) {
    if (closed) throw new IllegalStateException("the chat model is closed; make another");
    return idle.remove(texts);
  }

  private synchronized void keep(Chat chat, List<String> texts) {
    Chat other = closed ? chat : idle.put(texts, chat);
    if (other == null && idle.size() > most) other = idle.remove(idle.keySet().iterator().next());
    if (other != null) other.close();
  }

  /** Free the idle conversations. The model stays open. */
  @Override
  public synchronized void close() {
    closed = true;
    for (Chat chat : idle.values()) chat.close();
    idle.clear();
  }
}
