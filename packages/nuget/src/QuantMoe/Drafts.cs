using System;

namespace QuantMoe
{
    /// <summary>
    /// How the tokens of an answer are drafted. A step verifies a token and its draft tokens, so the answer has the same tokens in
    /// fewer steps.
    /// </summary>
    public sealed class Drafts
    {
        internal static readonly Drafts None = new Drafts(0, layer: false);

        internal readonly int Most; // draft tokens of a step
        internal readonly bool Layer;

        Drafts(int most, bool layer) => (Most, Layer) = (most, layer);

        /// <summary>Draft the tokens that followed the last tokens before in the text.</summary>
        /// <param name="most">The most draft tokens of a step.</param>
        public static Drafts Ngram(int most = 4) => new Drafts(Positive(most), layer: false);

        /// <summary>Draft with the layer of multi-token prediction, mtp.onnx.</summary>
        /// <param name="most">The most draft tokens of a step.</param>
        public static Drafts Mtp(int most = 4) => new Drafts(Positive(most), layer: true);

        static int Positive(int most) =>
            most > 0 ? most : throw new ArgumentOutOfRangeException(nameof(most), $"most is {most}, expected a number from 1");
    }
}
