using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Text.Json.Nodes;
using System.Threading;
using Tokenizers.DotNet;

namespace QuantMoe
{
    /// <summary>A folder's tokenizer.json. Any number of threads may use it.</summary>
    public sealed class TextTokenizer : IDisposable
    {
        readonly Tokenizer tokenizer;
        readonly ReaderWriterLockSlim closing = new ReaderWriterLockSlim();
        readonly int front, back; // special tokens around any text
        bool disposed;

        /// <summary>Read a tokenizer.json. Truncation and padding are off.</summary>
        /// <exception cref="FileNotFoundException">The folder has no tokenizer.json.</exception>
        public TextTokenizer(string folder)
        {
            string path = Path.Combine(folder ?? throw new ArgumentNullException(nameof(folder)), "tokenizer.json");
            if (!File.Exists(path))
                throw new FileNotFoundException(
                    $"{path} is missing: the model takes token ids; the folder's README.md says why. Use TokenCache", path);
            JsonObject json = JsonNode.Parse(File.ReadAllText(path))!.AsObject();
            json["truncation"] = json["padding"] = null;
            string copy = Path.GetTempFileName();
            try
            {
                File.WriteAllText(copy, json.ToJsonString());
                tokenizer = new Tokenizer(vocabPath: copy);
            }
            finally
            {
                File.Delete(copy);
            }
            uint[] around = tokenizer.Encode(""), example = tokenizer.Encode("a");
            while (front < around.Length && around[front] == example[front]) front++;
            back = around.Length - front;
        }

        /// <summary>Return the token ids of a text.</summary>
        /// <param name="text">The text.</param>
        /// <param name="special">Add the special tokens at the begin and end of a text.</param>
        public long[] Encode(string text, bool special)
        {
            uint[] ids = Open(() => tokenizer.Encode(text ?? throw new ArgumentNullException(nameof(text))));
            int skipped = special ? 0 : front;
            return ids.Skip(skipped).Take(ids.Length - skipped - (special ? 0 : back)).Select(id => (long)id).ToArray();
        }

        /// <summary>Return the text of token ids, without special tokens.</summary>
        public string Decode(IEnumerable<long> ids)
        {
            uint[] numbers = ids.Select(id => checked((uint)id)).ToArray();
            return Open(() => tokenizer.Decode(numbers));
        }

        T Open<T>(Func<T> use)
        {
            closing.EnterReadLock();
            try
            {
                if (disposed) throw new ObjectDisposedException(nameof(TextTokenizer));
                return use();
            }
            finally
            {
                closing.ExitReadLock();
            }
        }

        /// <summary>Wait for calls of other threads, and free the tokenizer.</summary>
        public void Dispose()
        {
            closing.EnterWriteLock();
            try
            {
                if (!disposed) tokenizer.Dispose();
                disposed = true;
            }
            finally
            {
                closing.ExitWriteLock();
            }
        }
    }
}
