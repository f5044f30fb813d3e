package quantmoe;

import java.util.List;

/** Options of an answer. */
public final class Options {
  long maxNewTokens = 512;
  Sampling sampling;
  List<String> stop = List.of();

  /** Begin with at most 512 new tokens, chosen as the model's makers recommend. */
  public Options() {}

  /**
   * Take the likeliest token.
   *
   * @return new options
   */
  public static Options greedy() {
    return new Options().sampling(Sampling.greedy());
  }

  /**
   * Set the most tokens of the answer.
   *
   * @param value a number from 0
   * @return these options
   */
  public Options maxNewTokens(long value) {
    if (value < 0) throw new IllegalArgumentException("maxNewTokens is " + value + ", expected a number from 0");
    maxNewTokens = value;
    return this;
  }

  /**
   * Set how tokens are chosen.
   *
   * @param value their options
   * @return these options
   */
  public Options sampling(Sampling value) {
    sampling = value;
    return this;
  }

  /**
   * Set strings that end an answer of text; they are not part of it.
   *
   * @param value the strings
   * @return these options
   */
  public Options stop(String... value) {
    stop = List.of(value);
    return this;
  }
}
