package quantmoe;

import java.util.*;
import java.util.stream.LongStream;

/**
 * A conversation with an exported model. Messages that were read stay in the KV cache. Answers are kept as their tokens. If the context is
 * full, the oldest messages are dropped with their answers. A system prompt stays. A model without a chat template goes on from each
 * message.
 */
public final class Chat implements AutoCloseable {
  private static final class Turn {
    final String message;
    final List<Long> answer = new ArrayList<>();

    Turn(String message) {
      this.message = message;
    }
  }

  private final Generator model;
  private final TextTokenizer tokenizer;
  private final TokenCache cache;
  private final String system; // null: none
  private final ChatTemplate template; // of a model whose turns are more than text around messages; null: of another
  private final boolean raw;
  private final List<Turn> turns = new ArrayList<>();
  private ReplyInfo last;

  /**
   * Begin a conversation.
   *
   * @param model the model that answers
   */
  public Chat(Generator model) {
    this(model, null, false);
  }

  /**
   * Begin a conversation.
   *
   * @param model the model that answers
   * @param system a system prompt; null: none
   * @param raw ignore the model's chat template
   * @throws UnsupportedOperationException the model takes no system prompt
   * @throws ModelException the folder has no tokenizer.json, or no chat template
   */
  public Chat(Generator model, String system, boolean raw) {
    this.model = Objects.requireNonNull(model, "model is null");
    this.system = system;
    template = !raw && model.metadata().containsKey("no_chat") ? model.template() : null;
    this.raw = raw || (template == null && !model.metadata().containsKey("chat.begin"));
    if (system != null && (this.raw || (template == null && !model.metadata().containsKey("chat.system"))))
      throw new UnsupportedOperationException(model.folder() + ": the model takes no system prompt; put it into the first message");
    tokenizer = model.tokenizer();
    cache = new TokenCache(model);
  }

  /** @return tokens of the last answer; null before the first answer */
  public ReplyInfo last() {
    return last;
  }

  /**
   * Add a message with an answer that is known. The next reply reads them.
   *
   * @param message the user's text
   * @param answer the answer to it
   */
  public void add(String message, String answer) {
    Objects.requireNonNull(message, "message is null");
    Objects.requireNonNull(answer, "answer is null");
    Turn turn = new Turn(message);
    for (long id : tokenizer.encode(answer, false)) turn.answer.add(id);
    turns.add(turn);
  }

  /**
   * Return the model's answer, chosen as its makers recommend.
   *
   * @param message the user's text
   * @return the pieces of the answer, as they come
   */
  public Answer<String> reply(String message) {
    return reply(message, new Options());
  }

  /**
   * Return the model's answer. The pieces that came are part of the conversation, also if you stop early or cancel.
   *
   * @param message the user's text
   * @param options the most tokens, how they are chosen, and strings that end the answer
   * @return the pieces of the answer, as they come
   * @throws IllegalArgumentException the message alone does not fit into the context
   * @throws IllegalStateException the conversation or the model is closed
   */
  public Answer<String> reply(String message, Options options) {
    Objects.requireNonNull(message, "message is null");
    Objects.requireNonNull(options, "options is null");
    Turn turn = new Turn(message);
    long context = model.contextLength(), room = Math.min(options.maxNewTokens, context / 4);
    int dropped = 0;
    long[] ids = ids(turn, 0);
    while (ids.length + room > context && dropped < turns.size()) ids = ids(turn, ++dropped);
    int kept = cache.keep(ids);
    TextStream stream = new TextStream(tokenizer, options.stop, raw ? ids : new long[0]);
    Answer<Long> tokens = cache.generate(Arrays.copyOfRange(ids, kept, ids.length), options);
    turns.subList(0, dropped).clear();
    turns.add(turn);
    ReplyInfo info = last = new ReplyInfo(ids.length, kept);
    boolean[] over = {false};
    return new Answer<>(() -> piece(tokens, turn, stream, info, over), tokens::cancel);
  }

  private String piece(Answer<Long> tokens, Turn turn, TextStream stream, ReplyInfo info, boolean[] over) {
    while (!over[0]) {
      Long id = tokens.hasNext() ? tokens.next() : null;
      if (id != null) info.tokens++;
      info.drafted = cache.drafted();
      info.accepted = cache.accepted();
      over[0] = id == null || model.stopTokens().contains(id);
      info.stopped = id != null && over[0];
      String piece;
      if (over[0]) {
        piece = stream.end();
      } else {
        turn.answer.add(id);
        piece = stream.push(id);
        over[0] = stream.stopped();
      }
      info.stopped |= stream.stopped();
      if (!piece.isEmpty()) return piece;
    }
    return null;
  }

  /** Return the tokens of the conversation after its oldest turns, with a new message. */
  private long[] ids(Turn message, int dropped) {
    List<Turn> all = new ArrayList<>(turns.subList(dropped, turns.size()));
    all.add(message);
    LongStream.Builder ids = LongStream.builder();
    List<String> messages = new ArrayList<>();
    for (Turn turn : all) {
      boolean first = messages.isEmpty();
      messages.add(turn.message);
      String before = !first ? model.value("chat.next")
          : system == null ? model.value("chat.begin")
          : model.value("chat.system") + system + model.value("chat.system_end");
      String text = template != null ? template.turn(system, messages)
          : raw ? turn.message
          : before + turn.message + model.value("chat.reply");
      for (long id : tokenizer.encode(text, raw && first)) ids.add(id);
      for (long id : turn.answer) ids.add(id);
    }
    return ids.build().toArray();
  }

  /** Cancel an answer that is being generated, wait for its step, and free the cache. */
  @Override
  public void close() {
    cache.close();
  }
}
