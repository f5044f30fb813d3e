using System;
using System.Collections.Generic;
using System.Linq;

namespace QuantMoe
{
    /// <summary>The text of tokens as they come: whole characters, and never the begin of a stop string.</summary>
    public sealed class TextStream
    {
        readonly NativeText.Handle handle;

        /// <summary>Begin after some tokens.</summary>
        /// <param name="tokenizer">The tokenizer of the tokens.</param>
        /// <param name="stop">Strings that end the text; they are not part of it.</param>
        /// <param name="after">
        /// Tokens before the first. Their text is not given, except a last character that they only begin.
        /// </param>
        public TextStream(TextTokenizer tokenizer, IEnumerable<string>? stop = null, IEnumerable<long>? after = null)
        {
            if (tokenizer == null) throw new ArgumentNullException(nameof(tokenizer));
            long[] ids = (after ?? Enumerable.Empty<long>()).ToArray();
            IntPtr made = NativeText.With(stop ?? Enumerable.Empty<string>(), texts =>
                NativeText.qm_text_stream_new(tokenizer.Handle, ids, (UIntPtr)ids.Length, texts, (UIntPtr)texts.Length));
            handle = new NativeText.Handle(made, NativeText.qm_text_stream_free);
        }

        /// <summary>Whether a stop string came; nothing after it is given.</summary>
        public bool Stopped => NativeText.qm_text_stream_stopped(handle) != 0;

        /// <summary>Return the text that one more token completes. It is empty while a character or a stop string may go on.</summary>
        public string Push(long id) => NativeText.Text(NativeText.qm_text_stream_push(handle, id));

        /// <summary>Return the text held back, after the last token.</summary>
        public string End() => NativeText.Text(NativeText.qm_text_stream_end(handle));
    }
}
