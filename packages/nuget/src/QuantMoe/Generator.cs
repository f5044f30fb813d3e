using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Text;
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
        readonly OrtValue? numLogits; // lives as long as the session
        readonly Lazy<TextTokenizer> tokenizer;
        readonly Lazy<ChatTemplate> template;
        bool disposed;

        /// <summary>Open an exported folder.</summary>
        /// <param name="folder">The folder that <c>quantmoe export</c> wrote.</param>
        /// <param name="configure">Changes the session's options, for example threads, entries or an execution provider.</param>
        /// <param name="drafts">How tokens are drafted; null: they are not.</param>
        /// <param name="device">Where the model runs: as it was exported.</param>
        /// <exception cref="FileNotFoundException">The folder has no model.</exception>
        /// <exception cref="OnnxRuntimeException">The model is damaged.</exception>
        /// <exception cref="ArgumentOutOfRangeException">The context has no room for so many draft tokens.</exception>
        /// <exception cref="InvalidDataException">generation_config.json is damaged.</exception>
        /// <exception cref="DllNotFoundException">A package has no library for this platform.</exception>
        /// <exception cref="NotSupportedException">
        /// The export cannot verify so many draft tokens, is for another device, or this ONNX Runtime has no CUDA provider.
        /// </exception>
        public Generator(string folder, Action<Microsoft.ML.OnnxRuntime.SessionOptions>? configure = null, Drafts? drafts = null,
            Device device = Device.Cpu)
            : this(folder, "model.onnx", configure, drafts ?? Drafts.None, device)
        {
            try
            {
                if (Drafts.Most > 0) CheckDrafts();
                if (Drafts.Layer) Layer = new Generator(folder, "mtp.onnx", configure, Drafts.None, device);
            }
            catch
            {
                Dispose();
                throw;
            }
        }

        Generator(string folder, string file, Action<Microsoft.ML.OnnxRuntime.SessionOptions>? configure, Drafts drafts, Device device)
        {
            Folder = folder ?? throw new ArgumentNullException(nameof(folder));
            Drafts = drafts;
            string path = Path.Combine(folder, file);
            if (folder == "" || !File.Exists(path))
                throw new FileNotFoundException($"{(folder == "" ? "\"\"" : path)}: missing; expected the folder of an exported model");
            using (var options = new Microsoft.ML.OnnxRuntime.SessionOptions())
            {
                if (drafts.Most > 0)
                {
                    numLogits = OrtValue.CreateTensorValueFromMemory(new long[] { drafts.Most + 1L }, new long[] { 1 });
                    options.AddInitializer("num_logits", numLogits);
                    // ONNX Runtime warns of logits that are more than the file declares.
                    options.LogSeverityLevel = OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR;
                }
                try
                {
                    configure?.Invoke(options);
                    options.RegisterQuantMoe(device); // reads the session's entries
                    Session = new InferenceSession(path, options);
                }
                catch (Exception error)
                {
                    numLogits?.Dispose();
                    if (error is OnnxRuntimeException cause) CheckDevice(path, device, cause);
                    throw;
                }
            }
            try
            {
                Metadata = Session.ModelMetadata.CustomMetadataMap;
                ContextLength = long.TryParse(Value("context_length"), out long length) ? length : long.MaxValue;
                ShortContext = long.TryParse(Value("short_context"), out length) ? length : long.MaxValue;
                Vocabulary = Session.OutputMetadata.TryGetValue("logits", out NodeMetadata? logits) && logits.Dimensions[2] > 0
                    ? logits.Dimensions[2] : long.MaxValue;
                StopTokens = Value("eos_token_id").Split(',').Where(id => id != "").Select(long.Parse).ToArray();
                Inputs = Session.InputNames.Where(name => name.StartsWith("past_key_values."))
                    .Select(name => new CacheInput(name, Session.InputMetadata[name])).ToArray();
                Sampling = Sampling.OfFolder(folder);
                HiddenName = new[] { "hidden_states_out", "hidden_states" }.FirstOrDefault(Session.OutputMetadata.ContainsKey) ?? "";
            }
            catch
            {
                Session.Dispose();
                numLogits?.Dispose();
                throw;
            }
            tokenizer = new Lazy<TextTokenizer>(() => new TextTokenizer(folder));
            template = new Lazy<ChatTemplate>(() => new ChatTemplate(folder));
        }

        /// <summary>Fail if a model that cannot be opened was exported for the other device. An entry of its metadata says so.</summary>
        void CheckDevice(string model, Device device, OnnxRuntimeException cause)
        {
            bool cpu = device == Device.Cpu;
            string entry = "\n\u0006target\u0012" + (cpu ? "\u0004cuda" : "\u0003cpu");
            if (!Encoding.GetEncoding(28591).GetString(File.ReadAllBytes(model)).Contains(entry)) return;
            throw new NotSupportedException(
                $"{Folder}: exported for {(cpu ? "NVIDIA GPUs" : "CPUs")}; open it with Device.{(cpu ? Device.Cuda : Device.Cpu)}, "
                + $"or export it with --target {(cpu ? "cpu" : "cuda")}", cause);
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

        /// <summary>Token ids are below it.</summary>
        internal long Vocabulary { get; }

        internal InferenceSession Session { get; }

        internal Drafts Drafts { get; }

        /// <summary>The model of mtp.onnx; null: nobody drafts with it.</summary>
        internal Generator? Layer { get; }

        /// <summary>The output of hidden states; empty: there is none.</summary>
        internal string HiddenName { get; }

        internal IReadOnlyList<CacheInput> Inputs { get; }

        internal bool HasStates => Inputs.Any(input => input.IsState);

        internal string Value(string name) => Metadata.TryGetValue(name, out string? value) ? value : "";

        /// <summary>Fail unless a step gives the logits and the states after a token and each of its draft tokens.</summary>
        void CheckDrafts()
        {
            if (Drafts.Layer && Metadata.ContainsKey("short_context"))
                throw new NotSupportedException(
                    $"{Folder}: rope_type longrope with a layer of multi-token prediction is not supported; take Drafts.Ngram");
            if (Drafts.Most > ContextLength)
                throw new ArgumentOutOfRangeException("drafts", $"most is {Drafts.Most}, expected a number from 1 to {ContextLength}");
            long tokens = Drafts.Most + 1L, rows = tokens;
            if (!Metadata.ContainsKey("num_logits"))
                rows = Session.OutputMetadata["logits"].Dimensions[1] == 1 ? 1 : long.TryParse(Value("logits"), out long number) ? number : tokens;
            string options = "";
            if (rows < tokens) options += $" --logits {tokens}";
            if (Inputs.Any(input => input.IsState && input.Window < tokens)) options += $" --state-window {tokens}";
            if (Drafts.Layer && (HiddenName == "" || !File.Exists(Path.Combine(Folder, "mtp.onnx")))) options += " --mtp";
            if (options != "")
                throw new NotSupportedException($"{Folder}: {Drafts.Most} draft tokens need an export with{options}");
        }

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
            Layer?.Dispose();
            Session.Dispose();
            numLogits?.Dispose();
            if (tokenizer.IsValueCreated) tokenizer.Value.Dispose();
            if (template.IsValueCreated) template.Value.Dispose();
        }
    }
}
