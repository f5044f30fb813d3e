package quantmoe;

/**
 * How the tokens of an answer are drafted. A step verifies a token and its draft tokens, so the answer has the same tokens in fewer
 * steps.
 */
public final class Drafts {
  enum Kind { NONE, NGRAM, MTP }

  static final Drafts NONE = new Drafts(Kind.NONE, 0);

  final Kind kind;
  final int most; // draft tokens of a step

  private Drafts(Kind kind, int most) {
    this.kind = kind;
    this.most = most;
  }

  /**
   * Draft the tokens that followed the last tokens before in the text.
   *
   * @param most the most draft tokens of a step, for example 4
   * @return the choice
   */
  public static Drafts ngram(int most) {
    return new Drafts(Kind.NGRAM, positive(most));
  }

  /**
   * Draft with the layer of multi-token prediction, mtp.onnx.
   *
   * @param most the most draft tokens of a step, for example 4
   * @return the choice
   */
  public static Drafts mtp(int most) {
    return new Drafts(Kind.MTP, positive(most));
  }

  private static int positive(int most) {
    if (most < 1) throw new IllegalArgumentException("most is " + most + ", expected a number from 1");
    return most;
  }
}
