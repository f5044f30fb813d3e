package quantmoe;

import com.google.gson.*;
import java.io.IOException;
import java.nio.file.*;

/** Options for choosing tokens, with transformers' defaults and order. */
public final class Sampling {
  double temperature = 1, topP = 1, minP, repetitionPenalty = 1, presencePenalty, frequencyPenalty;
  int topK = 50;
  Long seed;

  /** Begin with transformers' defaults: temperature 1 and the 50 likeliest tokens. */
  public Sampling() {}

  /**
   * Take the likeliest token, without penalties.
   *
   * @return new options
   */
  public static Sampling greedy() {
    return new Sampling().temperature(0);
  }

  /** @return other options with the same numbers */
  public Sampling copy() {
    Sampling made = new Sampling();
    made.temperature = temperature;
    made.topK = topK;
    made.topP = topP;
    made.minP = minP;
    made.repetitionPenalty = repetitionPenalty;
    made.presencePenalty = presencePenalty;
    made.frequencyPenalty = frequencyPenalty;
    made.seed = seed;
    return made;
  }

  /**
   * Set what divides the logits.
   *
   * @param value a number from 0, which takes the likeliest token
   * @return these options
   */
  public Sampling temperature(double value) {
    temperature = expect(value >= 0, "temperature", value, "a number from 0");
    return this;
  }

  /**
   * Keep so many of the likeliest tokens, and tokens as likely as the last of them.
   *
   * @param value an integer from 0, which keeps all
   * @return these options
   */
  public Sampling topK(int value) {
    topK = (int) expect(value >= 0, "topK", value, "an integer from 0");
    return this;
  }

  /**
   * Keep the fewest of these tokens whose probabilities sum up to a number.
   *
   * @param value a number above 0, at most 1
   * @return these options
   */
  public Sampling topP(double value) {
    topP = expect(value > 0 && value <= 1, "topP", value, "a number above 0, at most 1");
    return this;
  }

  /**
   * Keep the tokens that are at least this many times as likely as the likeliest token.
   *
   * @param value a number from 0 to 1
   * @return these options
   */
  public Sampling minP(double value) {
    minP = expect(value >= 0 && value <= 1, "minP", value, "a number from 0 to 1");
    return this;
  }

  /**
   * Set what divides the logit of each token of prompt and answer, and multiplies a negative logit.
   *
   * @param value a number above 0
   * @return these options
   */
  public Sampling repetitionPenalty(double value) {
    repetitionPenalty = expect(value > 0, "repetitionPenalty", value, "a number above 0");
    return this;
  }

  /**
   * Set what is subtracted from the logit of each token of the answer.
   *
   * @param value a number
   * @return these options
   */
  public Sampling presencePenalty(double value) {
    presencePenalty = expect(true, "presencePenalty", value, "a number");
    return this;
  }

  /**
   * Set what is subtracted as often as the token occurs in the answer.
   *
   * @param value a number
   * @return these options
   */
  public Sampling frequencyPenalty(double value) {
    frequencyPenalty = expect(true, "frequencyPenalty", value, "a number");
    return this;
  }

  /**
   * Set the seed of the random numbers. Without a seed they are others each time.
   *
   * @param value the seed
   * @return these options
   */
  public Sampling seed(long value) {
    seed = value;
    return this;
  }

  /** Return what a folder's generation_config.json recommends; without the file, the likeliest token. */
  static Sampling ofFolder(String folder) {
    Path path = Path.of(folder, "generation_config.json");
    Sampling sampling = greedy();
    if (!Files.exists(path)) return sampling;
    try {
      JsonObject config = JsonParser.parseString(Files.readString(path)).getAsJsonObject();
      sampling.repetitionPenalty(number(config, "repetition_penalty", 1));
      JsonElement samples = config.get("do_sample");
      if (samples == null || samples.isJsonNull() || !samples.getAsBoolean()) return sampling;
      return sampling.temperature(number(config, "temperature", 1)).topK((int) number(config, "top_k", 50))
          .topP(number(config, "top_p", 1)).minP(number(config, "min_p", 0));
    } catch (IOException | RuntimeException error) {
      throw new ModelException(path + ": " + error.getMessage());
    }
  }

  private static double number(JsonObject config, String name, double value) {
    JsonElement found = config.get(name);
    return found == null || found.isJsonNull() ? value : found.getAsDouble();
  }

  private static double expect(boolean holds, String name, double found, String expected) {
    if (!holds || Double.isNaN(found) || Double.isInfinite(found))
      throw new IllegalArgumentException(name + " is " + found + ", expected " + expected);
    return found;
  }
}
