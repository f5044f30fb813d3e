using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Text;

namespace QuantMoe
{
    /// <summary>A folder's tokenizer.json. Any number of threads may use it.</summary>
    public sealed class TextTokenizer : IDisposable
    {
        readonly NativeText.Handle handle;

        /// <summary>Read a tokenizer.json. Truncation and padding are off.</summary>
        /// <exception cref="FileNotFoundException">The folder has no tokenizer.json.</exception>
        /// <exception cref="InvalidDataException">The file is damaged.</exception>
        /// <exception cref="DllNotFoundException">The package has no libquantmoe_text for this platform.</exception>
        public TextTokenizer(string folder)
        {
            string path = Path.Combine(folder ?? throw new ArgumentNullException(nameof(folder)), "tokenizer.json");
            if (!File.Exists(path))
                throw new FileNotFoundException(
                    $"{path} is missing: the model takes token ids; the folder's README.md says why. Use TokenCache", path);
            handle = new NativeText.Handle(NativeText.qm_tokenizer_open(NativeText.String(folder)), NativeText.qm_tokenizer_free);
        }

        internal NativeText.Handle Handle =>
            handle.IsClosed ? throw new ObjectDisposedException(nameof(TextTokenizer)) : handle;

        /// <summary>Return the token ids of a text.</summary>
        /// <param name="text">The text.</param>
        /// <param name="special">Add the special tokens at the begin and end of a text.</param>
        public long[] Encode(string text, bool special)
        {
            byte[] bytes = Encoding.UTF8.GetBytes(text ?? throw new ArgumentNullException(nameof(text)));
            return NativeText.Ids(NativeText.qm_tokenizer_encode(Handle, bytes, (UIntPtr)bytes.Length, special ? 1 : 0));
        }

        /// <summary>Return the text of token ids.</summary>
        /// <param name="ids">The ids.</param>
        /// <param name="special">Leave the special tokens among them in the text.</param>
        /// <exception cref="InvalidDataException">An id is negative or above 32 bits.</exception>
        public string Decode(IEnumerable<long> ids, bool special = false)
        {
            long[] numbers = ids.ToArray();
            return NativeText.Text(NativeText.qm_tokenizer_decode(Handle, numbers, (UIntPtr)numbers.Length, special ? 1 : 0));
        }

        /// <summary>Free the tokenizer, after calls of other threads.</summary>
        public void Dispose() => handle.Dispose();
    }
}
