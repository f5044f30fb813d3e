using System;
using System.Collections.Generic;
using System.Linq;

namespace QuantMoe
{
    /// <summary>The text of tokens as they come: whole characters, and never the begin of a stop string.</summary>
    public sealed class TextStream
    {
        readonly TextTokenizer tokenizer;
        readonly string[] stop;
        readonly List<long> ids;
        string held = "";
        int begin; // the tokens from `begin` are decoded
        int given; // the text of the first `given` tokens ends with a whole character
        int shown; // characters of the decoded text that were given

        /// <summary>Begin after some tokens.</summary>
        /// <param name="tokenizer">The tokenizer of the tokens.</param>
        /// <param name="stop">Strings that end the text; they are not part of it.</param>
        /// <param name="after">
        /// Tokens before the first. Their text is not given, except a last character that they only begin.
        /// </param>
        public TextStream(TextTokenizer tokenizer, IEnumerable<string>? stop = null, IEnumerable<long>? after = null)
        {
            this.tokenizer = tokenizer ?? throw new ArgumentNullException(nameof(tokenizer));
            this.stop = (stop ?? Enumerable.Empty<string>()).Where(text => text != "").ToArray();
            ids = (after ?? Enumerable.Empty<long>()).ToList();
            string text = Decoded();
            shown = Whole(text).Length;
            given = shown == text.Length ? ids.Count : 0;
        }

        /// <summary>Whether a stop string came; nothing after it is given.</summary>
        public bool Stopped { get; private set; }

        /// <summary>Return the text that one more token completes. It is empty while a character or a stop string may go on.</summary>
        public string Push(long id)
        {
            ids.Add(id);
            string text = Decoded(), whole = Whole(text);
            if (whole.Length <= shown) return "";
            string found = whole.Substring(shown);
            shown = whole.Length;
            if (whole == text)
            {
                begin = given; // a token's text depends on the tokens right before it, in decoders of words
                given = ids.Count;
                shown = Decoded().Length;
            }
            return Release(found);
        }

        /// <summary>Return the text held back, after the last token.</summary>
        public string End()
        {
            string text = Decoded(), found = Release(text.Substring(Math.Min(shown, text.Length)));
            return Stopped ? found : found + held;
        }

        string Decoded() => tokenizer.Decode(ids.Skip(begin));

        static string Whole(string text) => text.TrimEnd('\uFFFD'); // bytes of a character whose others may come

        string Release(string text)
        {
            if (Stopped) return "";
            text = held + text;
            held = "";
            int[] found = stop.Select(end => text.IndexOf(end, StringComparison.Ordinal)).Where(at => at >= 0).ToArray();
            if (found.Length > 0)
            {
                Stopped = true;
                return text.Substring(0, found.Min());
            }
            int most = stop.Select(end => Begun(text, end)).DefaultIfEmpty(0).Max();
            held = text.Substring(text.Length - most);
            return text.Substring(0, text.Length - most);
        }

        // How many characters at a text's end begin the stop string.
        static int Begun(string text, string end)
        {
            int length = Math.Min(text.Length, end.Length - 1);
            while (length > 0 && string.CompareOrdinal(text, text.Length - length, end, 0, length) != 0) length--;
            return length;
        }
    }
}
