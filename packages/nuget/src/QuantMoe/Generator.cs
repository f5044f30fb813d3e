using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using Microsoft.ML.OnnxRuntime;

namespace QuantMoe
{
    /// <summary>
    /// An exported model that generates tokens. Any number of threads may use it, each with a <see cref="TokenCache"/> or
    /// <see cref="Chat"/> of its own.
    /// </summary>
    public sealed class Generator : IDisposable
    {
        readonly HashSet<TokenCache> caches = new HashSet<TokenCache>();
        readonly Lazy<TextTokenizer> tokenizer;
        readonly Lazy<ChatTemplate> template;
        bool disposed;

        /// <summary>Open an exported folder.</summary>
        /// <param name="folder">The folder that <c>quantmoe export</c> wrote.</param>
        /// <param name="configure">Changes the session's options, for example threads, entries or an execution provider.</param>
        /// <exception cref="OnnxRuntimeException">The folder has no model, or a damaged one.</exception>
        /// <exception cref="InvalidDataException">generation_config.json is damaged.</exception>
        /// <exception cref="DllNotFoundException">The package has no library for this platform.</exception>
        public Generator(string folder, Action<Microsoft.ML.OnnxRuntime.SessionOptions>? configure = null)
        {
            Folder = folder ?? throw new ArgumentNullException(nameof(folder));
            using (var options = new Microsoft.ML.OnnxRuntime.SessionOptions())
            {
                configure?.Invoke(options);
                options.RegisterQuantMoe(); // reads the session's entries
                Session = new InferenceSession(Path.Combine(folder, "model.onnx"), options);
            }
            try
            {
                Metadata = Session.ModelMetadata.CustomMetadataMap;
                ContextLength = long.TryParse(Value("context_length"), out long length) ? length : long.MaxValue;
                ShortContext = long.TryParse(Value("short_context"), out length) ? length : long.MaxValue;
                StopTokens = Value("eos_token_id").Split(',').Where(id => id != "").Select(long.Parse).ToArray();
                Inputs = Session.InputNames.Where(name => name.StartsWith("past_key_values."))
                    .Select(name => new CacheInput(name, Session.InputMetadata[name])).ToArray();
                Sampling = Sampling.OfFolder(folder);
            }
            catch
            {
                Session.Dispose();
                throw;
            }
            tokenizer = new Lazy<TextTokenizer>(() => new TextTokenizer(folder));
            template = new Lazy<ChatTemplate>(() => new ChatTemplate(folder));
        }

        /// <summary>The folder as it was given.</summary>
        public string Folder { get; }

        /// <summary>The model's metadata.</summary>
        public IReadOnlyDictionary<string, string> Metadata { get; }

        /// <summary>The most tokens of a text, prompt and answers together.</summary>
        public long ContextLength { get; }

        /// <summary>The ids of the tokens after which an answer ends.</summary>
        public IReadOnlyList<long> StopTokens { get; }

        /// <summary>How the model's makers choose tokens, from generation_config.json.</summary>
        public Sampling Sampling { get; }

        /// <summary>The folder's tokenizer.</summary>
        /// <exception cref="FileNotFoundException">The folder has no tokenizer.json.</exception>
        public TextTokenizer Tokenizer => Open(tokenizer);

        /// <summary>The folder's chat template.</summary>
        /// <exception cref="InvalidDataException">There is none, or it is damaged.</exception>
        internal ChatTemplate Template => Open(template);

        T Open<T>(Lazy<T> of)
        {
            lock (caches)
            {
                if (disposed) throw new ObjectDisposedException(nameof(Generator));
                return of.Value;
            }
        }

        /// <summary>Longer texts are run again from their first token (longrope).</summary>
        internal long ShortContext { get; }

        internal InferenceSession Session { get; }

        internal IReadOnlyList<CacheInput> Inputs { get; }

        internal bool HasStates => Inputs.Any(input => input.IsState);

        internal string Value(string name) => Metadata.TryGetValue(name, out string? value) ? value : "";

        internal void Add(TokenCache cache)
        {
            lock (caches)
            {
                if (disposed) throw new ObjectDisposedException(nameof(Generator));
                caches.Add(cache);
            }
        }

        internal void Remove(TokenCache cache)
        {
            lock (caches) caches.Remove(cache);
        }

        /// <summary>Cancel answers that are being generated, wait for their last step, and close the model and its caches.</summary>
        public void Dispose()
        {
            TokenCache[] open;
            lock (caches)
            {
                if (disposed) return;
                disposed = true;
                open = caches.ToArray();
            }
            foreach (TokenCache cache in open) cache.Dispose();
            Session.Dispose();
            if (tokenizer.IsValueCreated) tokenizer.Value.Dispose();
            if (template.IsValueCreated) template.Value.Dispose();
        }
    }
}
