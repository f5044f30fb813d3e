package quantmoe;

import java.util.*;
import java.util.stream.*;

/** Chooses token after token; the same seed and logits give the same tokens. */
final class Sampler {
  private final Sampling of;
  private final Random random;
  private final Set<Integer> seen = new HashSet<>();
  private final Map<Integer, Integer> chosen = new HashMap<>();

  Sampler(Sampling sampling, LongStream prompt) {
    of = sampling;
    // Seeds that follow each other give Random almost the same first number, so they are spread.
    random = of.seed == null ? new Random() : new Random(of.seed * 0x9E3779B97F4A7C15L);
    prompt.forEach(id -> seen.add((int) id));
  }

  /** Return a token id, from finite logits, which penalties change. */
  int choose(float[] logits) {
    penalize(logits);
    int token = 0;
    for (int i = 1; i < logits.length; i++) if (logits[i] > logits[token]) token = i;
    if (of.temperature > 0) token = drawn(logits, logits[token]);
    seen.add(token);
    chosen.merge(token, 1, Integer::sum);
    return token;
  }

  private void penalize(float[] logits) {
    float repetition = (float) of.repetitionPenalty;
    if (repetition != 1) for (int id : seen) logits[id] = logits[id] < 0 ? logits[id] * repetition : logits[id] / repetition;
    for (var token : chosen.entrySet())
      logits[token.getKey()] -= (float) (of.presencePenalty + of.frequencyPenalty * token.getValue());
  }

  private int drawn(float[] logits, float most) {
    double total = of.topK > 0 ? 0 : IntStream.range(0, logits.length).mapToDouble(id -> weight(logits, id, most)).sum();
    // The likeliest tokens are sorted, and all of them only if these are too few: most vocabularies are large.
    for (double least = most - 16 * of.temperature; ; least = Double.NEGATIVE_INFINITY) {
      double floor = least;
      int[] ids = IntStream.range(0, logits.length).filter(id -> logits[id] >= floor).boxed()
          .sorted(Comparator.comparing((Integer id) -> -logits[id])).mapToInt(id -> id).toArray();
      boolean all = ids.length == logits.length || least == Double.NEGATIVE_INFINITY;
      int count = ids.length;
      if (of.topK > 0 && of.topK < count) {
        count = of.topK;
        while (count < ids.length && logits[ids[count]] == logits[ids[count - 1]]) count++;
      } else if (of.topK > 0 && !all) {
        continue;
      }
      double[] weights = IntStream.of(ids).limit(count).mapToDouble(id -> weight(logits, id, most)).toArray();
      double whole = of.topK > 0 ? DoubleStream.of(weights).sum() : total, sum = 0;
      int kept = 0;
      while (kept < count && sum < of.topP * whole) sum += weights[kept++];
      if (kept == count && !all && of.topK == 0) continue;
      while (kept > 1 && weights[kept - 1] < of.minP * weights[0]) sum -= weights[--kept];
      double at = random.nextDouble() * sum;
      for (int i = 0; i < kept; i++) if ((at -= weights[i]) < 0) return ids[i];
      return ids[kept - 1];
    }
  }

  private double weight(float[] logits, int id, float most) {
    return Math.exp((logits[id] - (double) most) / of.temperature);
  }
}
