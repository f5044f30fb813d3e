using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Text.Json;

namespace QuantMoe
{
    /// <summary>Options for choosing tokens, with transformers' defaults and order.</summary>
    public sealed class Sampling
    {
        /// <summary>Take the likeliest token, without penalties.</summary>
        public static Sampling Greedy { get; } = new Sampling { Temperature = 0 };

        /// <summary>Divides the logits; 0 takes the likeliest token.</summary>
        public double Temperature { get; set; } = 1;

        /// <summary>Keeps so many of the likeliest tokens, and tokens as likely as the last of them; 0: all.</summary>
        public int TopK { get; set; } = 50;

        /// <summary>Keeps the fewest of these tokens whose probabilities sum up to this number.</summary>
        public double TopP { get; set; } = 1;

        /// <summary>Keeps the tokens that are at least this many times as likely as the likeliest token; 0: all.</summary>
        public double MinP { get; set; }

        /// <summary>Divides the logit of each token of prompt and answer; multiplies a negative logit.</summary>
        public double RepetitionPenalty { get; set; } = 1;

        /// <summary>Subtracted from the logit of each token of the answer.</summary>
        public double PresencePenalty { get; set; }

        /// <summary>Subtracted as often as the token occurs in the answer.</summary>
        public double FrequencyPenalty { get; set; }

        /// <summary>The seed of the random numbers; null: another one each time.</summary>
        public int? Seed { get; set; }

        /// <summary>Return what a folder's generation_config.json recommends; without the file, the likeliest token.</summary>
        /// <exception cref="InvalidDataException">The file is damaged, or a number is outside its range.</exception>
        internal static Sampling OfFolder(string folder)
        {
            string path = Path.Combine(folder, "generation_config.json");
            if (!File.Exists(path)) return Greedy;
            try
            {
                using JsonDocument json = JsonDocument.Parse(File.ReadAllBytes(path));
                JsonElement? Value(string name) =>
                    json.RootElement.TryGetProperty(name, out JsonElement found) && found.ValueKind != JsonValueKind.Null ? found : null;
                var sampling = new Sampling { RepetitionPenalty = Value("repetition_penalty")?.GetDouble() ?? 1 };
                if (Value("do_sample")?.GetBoolean() == true)
                {
                    sampling.Temperature = Value("temperature")?.GetDouble() ?? 1;
                    sampling.TopK = Value("top_k")?.GetInt32() ?? 50;
                    sampling.TopP = Value("top_p")?.GetDouble() ?? 1;
                    sampling.MinP = Value("min_p")?.GetDouble() ?? 0;
                }
                else sampling.Temperature = 0;
                sampling.Check();
                return sampling;
            }
            catch (Exception error) when (error is JsonException || error is InvalidOperationException || error is FormatException
                || error is ArgumentException)
            {
                throw new InvalidDataException($"{path}: {error.Message}", error);
            }
        }

        internal Sampling Copy() => (Sampling)MemberwiseClone();

        /// <exception cref="ArgumentOutOfRangeException">A number is outside its range.</exception>
        internal void Check()
        {
            Expect(Temperature >= 0 && Finite(Temperature), nameof(Temperature), Temperature, "a number from 0");
            Expect(TopK >= 0, nameof(TopK), TopK, "an integer from 0");
            Expect(TopP > 0 && TopP <= 1, nameof(TopP), TopP, "a number above 0, at most 1");
            Expect(MinP >= 0 && MinP <= 1, nameof(MinP), MinP, "a number from 0 to 1");
            Expect(RepetitionPenalty > 0 && Finite(RepetitionPenalty), nameof(RepetitionPenalty), RepetitionPenalty, "a number above 0");
            Expect(Finite(PresencePenalty), nameof(PresencePenalty), PresencePenalty, "a number");
            Expect(Finite(FrequencyPenalty), nameof(FrequencyPenalty), FrequencyPenalty, "a number");
        }

        static bool Finite(double number) => !double.IsNaN(number) && !double.IsInfinity(number);

        static void Expect(bool holds, string name, double found, string expected)
        {
            if (!holds) throw new ArgumentOutOfRangeException(name, FormattableString.Invariant($"{name} is {found}, expected {expected}"));
        }
    }

    /// <summary>Chooses token after token; the same seed and logits give the same tokens.</summary>
    sealed class Sampler
    {
        readonly Sampling sampling;
        readonly Random random;
        readonly HashSet<long> seen;
        readonly Dictionary<long, int> chosen = new Dictionary<long, int>();

        public Sampler(Sampling sampling, IEnumerable<long> prompt)
        {
            sampling.Check();
            this.sampling = sampling.Copy(); // the caller may change it while tokens come
            random = sampling.Seed is int seed ? new Random(seed) : new Random();
            seen = new HashSet<long>(prompt);
        }

        /// <summary>Return a token id, from finite logits, which penalties change.</summary>
        public long Choose(float[] logits)
        {
            Penalize(logits);
            int token = Best(logits);
            if (sampling.Temperature > 0) token = Drawn(logits, logits[token]);
            seen.Add(token);
            chosen[token] = (chosen.TryGetValue(token, out int times) ? times : 0) + 1;
            return token;
        }

        void Penalize(float[] logits)
        {
            float repetition = (float)sampling.RepetitionPenalty;
            if (repetition != 1)
                foreach (long id in seen) logits[id] = logits[id] < 0 ? logits[id] * repetition : logits[id] / repetition;
            if (sampling.PresencePenalty != 0 || sampling.FrequencyPenalty != 0)
                foreach (var token in chosen)
                    logits[token.Key] -= (float)(sampling.PresencePenalty + sampling.FrequencyPenalty * token.Value);
        }

        internal static int Best(float[] logits)
        {
            int best = 0;
            for (int i = 1; i < logits.Length; i++)
                if (logits[i] > logits[best]) best = i;
            return best;
        }

        int Drawn(float[] logits, float most)
        {
            double Weight(int id) => Math.Exp((logits[id] - (double)most) / sampling.Temperature);
            double total = 0;
            if (sampling.TopK == 0)
                for (int i = 0; i < logits.Length; i++) total += Weight(i);
            // The likeliest tokens are sorted, and all of them only if these are too few: most vocabularies are large.
            for (double least = most - 16 * sampling.Temperature;; least = double.NegativeInfinity)
            {
                int[] ids = Enumerable.Range(0, logits.Length).Where(id => logits[id] >= least).OrderByDescending(id => logits[id]).ToArray();
                bool all = ids.Length == logits.Length || double.IsNegativeInfinity(least);
                int count = ids.Length;
                if (sampling.TopK > 0 && sampling.TopK < count)
                {
                    count = sampling.TopK;
                    while (count < ids.Length && logits[ids[count]] == logits[ids[count - 1]]) count++;
                }
                else if (sampling.TopK > 0 && !all) continue;
                double[] weights = ids.Take(count).Select(Weight).ToArray();
                double whole = sampling.TopK > 0 ? weights.Sum() : total, sum = 0;
                int kept = 0;
                while (kept < count && sum < sampling.TopP * whole) sum += weights[kept++];
                if (kept == count && !all && sampling.TopK == 0) continue;
                while (kept > 1 && weights[kept - 1] < sampling.MinP * weights[0]) sum -= weights[--kept];
                double at = random.NextDouble() * sum;
                for (int i = 0; i < kept; i++)
                    if ((at -= weights[i]) < 0) return ids[i];
                return ids[kept - 1];
            }
        }
    }
}
