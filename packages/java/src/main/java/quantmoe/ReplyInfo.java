package quantmoe;

/** Tokens of an answer, and why it ended. */
public final class ReplyInfo {
  /** Tokens of the conversation before the answer. */
  public final int promptTokens;

  /** Those of them that the cache had already. */
  public final int keptTokens;

  int tokens, drafted, accepted;
  boolean stopped;

  ReplyInfo(int promptTokens, int keptTokens) {
    this.promptTokens = promptTokens;
    this.keptTokens = keptTokens;
  }

  /** @return tokens of the answer */
  public int tokens() {
    return tokens;
  }

  /** @return draft tokens that were verified */
  public int drafted() {
    return drafted;
  }

  /** @return the draft tokens that are part of the answer */
  public int accepted() {
    return accepted;
  }

  /** @return whether the model or a stop string ended the answer, and not the number of tokens */
  public boolean stopped() {
    return stopped;
  }
}
