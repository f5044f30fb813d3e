using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Runtime.CompilerServices;
using System.Threading;
using System.Threading.Tasks;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntime.Tensors;

namespace QuantMoe
{
    /// <summary>
    /// What a model has read: the KV cache of one text. It generates one answer at a time. Generation that is cancelled leaves
    /// the tokens of whole steps, and goes on.
    /// </summary>
    public sealed class TokenCache : IDisposable
    {
        const int Chunk = 512; // prompt tokens of a step
        const int Pending = 256; // tokens that the layer of multi-token prediction reads at once
        const int Tail = 8; // tokens before a prompt's end, to whose states a hybrid model can go back
        internal const int MostStates = 4; // states are large

        readonly Generator model;
        readonly IReadOnlyList<CacheInput> inputs;
        readonly bool shares; // keys and values are written in place
        readonly bool goesBack;
        readonly object gate = new object(); // held by each use of native memory
        readonly RunOptions run = new RunOptions();
        readonly OrtIoBinding binding;
        readonly List<long> read = new List<long>();
        readonly SortedDictionary<long, List<byte[]>> states = new SortedDictionary<long, List<byte[]>>();
        OrtValue[] cache, spare; // a step reads states from one and writes them into the other
        IDisposableReadOnlyCollection<OrtValue>? last; // has a cache that is not written in place
        long[] unread = Array.Empty<long>(); // tokens of the text that no step has read
        long capacity;
        readonly TokenCache? layer; // of mtp.onnx; null: nobody drafts with it
        int ahead; // draft tokens at the end that were not given, or given last
        int lastStep; // tokens of the last step
        byte[] hidden = Array.Empty<byte>(); // hidden states of the last step
        byte[]? given; // hidden states that the next step reads
        readonly List<long> heard = new List<long>(); // tokens that the layer has not read
        readonly List<byte> heardHidden = new List<byte>(); // the hidden states before them
        byte[] heardLast = Array.Empty<byte>(); // the last token's hidden state
        volatile int busy;
        volatile bool closing;
        bool disposed;

        /// <summary>Make an empty cache.</summary>
        /// <param name="model">The model that reads and answers.</param>
        /// <param name="goesBack">
        /// Keep copies of a hybrid model's states, so that <see cref="Keep"/> goes back to the end of a prompt and files of
        /// <see cref="Save"/> serve prompts that begin alike. Other models can always go back.
        /// </param>
        public TokenCache(Generator model, bool goesBack = false)
        {
            this.model = model ?? throw new ArgumentNullException(nameof(model));
            this.goesBack = goesBack && model.HasStates;
            inputs = model.Inputs;
            shares = model.Value("past_present_share_buffer") == "true";
            layer = model.Layer == null ? null : new TokenCache(model.Layer);
            lock (gate) // the model may be closed from now on, and waits
            {
                model.Add(this);
                cache = inputs.Select(input => input.Allocate(0)).ToArray();
                spare = inputs.Select((input, i) => shares && input.IsState ? input.Allocate(0) : cache[i]).ToArray();
                binding = model.Session.CreateIoBinding();
            }
        }

        /// <summary>Read a file of <see cref="Save"/> or of <c>quantmoe generate --save-state</c>.</summary>
        /// <param name="model">The model that wrote the file.</param>
        /// <param name="path">The file.</param>
        /// <param name="goesBack">As for an empty cache.</param>
        /// <exception cref="InvalidDataException">The file is damaged or of another model.</exception>
        /// <exception cref="IOException">The file cannot be read.</exception>
        public static TokenCache Load(Generator model, string path, bool goesBack = false)
        {
            var made = new TokenCache(model, goesBack);
            try
            {
                using var file = new SavedCache(path, model.Value("identity"), made.inputs);
                if (file.Tokens.Length > model.ContextLength)
                    throw new InvalidDataException(
                        $"{path}: has {file.Tokens.Length} tokens, the model's context has {model.ContextLength}");
                if (made.shares) made.Reserve(file.Tokens.Length);
                else made.Replace(file.Tokens.Length, 0);
                for (int i = 0; i < made.inputs.Count; i++) file.Load(made.inputs[i], made.cache[i]);
                foreach (var end in file.LoadStates()) made.states[end.Key] = end.Value;
                made.read.AddRange(file.Tokens);
                return made;
            }
            catch
            {
                made.Dispose();
                throw;
            }
        }

        /// <summary>How many tokens were read.</summary>
        public int Length => read.Count - ahead;

        /// <summary>Draft tokens of the last answer.</summary>
        internal int Drafted { get; private set; }

        /// <summary>The draft tokens of the last answer that were right.</summary>
        internal int Accepted { get; private set; }

        /// <summary>Return the tokens that were read.</summary>
        public long[] ToArray()
        {
            lock (gate) return read.Take(Length).ToArray();
        }

        /// <summary>
        /// Go back to the tokens with which a text begins, or as near before their end as states allow.
        /// </summary>
        /// <returns>The number of tokens kept, at most all of the text except the last, whose logits are needed.</returns>
        /// <exception cref="InvalidOperationException">An answer is being generated.</exception>
        public int Keep(IReadOnlyList<long> ids)
        {
            if (ids == null) throw new ArgumentNullException(nameof(ids));
            Begin();
            try
            {
                lock (gate)
                {
                    ThrowIfDisposed();
                    int same = Shared(ids);
                    if (same < Length && model.HasStates) same = (int)states.Keys.LastOrDefault(end => end <= same);
                    Rewind(same);
                    unread = Array.Empty<long>();
                    return same;
                }
            }
            finally
            {
                busy = 0;
            }
        }

        /// <summary>Return how many tokens a text shares with the cache, at most all except its last one.</summary>
        internal int Shared(IReadOnlyList<long> ids)
        {
            int same = 0;
            while (same < Math.Min(Length, ids.Count - 1) && read[same] == ids[same]) same++;
            return same;
        }

        /// <summary>
        /// Read ids after all that was read and said before, and return the tokens of the answer as they come. A token that
        /// ends the answer is the last one.
        /// </summary>
        /// <param name="ids">New tokens of the text.</param>
        /// <param name="maxNewTokens">The most tokens of the answer.</param>
        /// <param name="sampling">How tokens are chosen; null: as the model's makers recommend.</param>
        /// <param name="cancellationToken">Ends the answer within a step.</param>
        /// <exception cref="ArgumentException">There are no tokens to read, or they do not fit into the context.</exception>
        /// <exception cref="ArgumentOutOfRangeException">A token is outside the vocabulary.</exception>
        /// <exception cref="InvalidOperationException">Another answer is being generated.</exception>
        /// <exception cref="ObjectDisposedException">The cache is closed, or was closed meanwhile.</exception>
        /// <exception cref="OperationCanceledException">It was cancelled.</exception>
        /// <exception cref="InvalidDataException">The model's logits are not finite.</exception>
        public IAsyncEnumerable<long> GenerateAsync(IReadOnlyList<long> ids, int maxNewTokens = 512, Sampling? sampling = null,
            CancellationToken cancellationToken = default)
        {
            if (ids == null) throw new ArgumentNullException(nameof(ids));
            if (maxNewTokens < 0) throw new ArgumentOutOfRangeException(nameof(maxNewTokens), $"maxNewTokens is {maxNewTokens}, expected a number from 0");
            foreach (long id in ids)
                if (id < 0 || id >= model.Vocabulary)
                    throw new ArgumentOutOfRangeException(nameof(ids), $"token id {id} is outside the vocabulary, 0 to {model.Vocabulary - 1}");
            sampling ??= model.Sampling;
            sampling.Check();
            ThrowIfDisposed();
            return Generated(ids.ToArray(), maxNewTokens, sampling, cancellationToken);
        }

        async IAsyncEnumerable<long> Generated(long[] ids, int maxNewTokens, Sampling sampling,
            [EnumeratorCancellation] CancellationToken cancellationToken)
        {
            Begin();
            try
            {
                ids = unread.Concat(ids).ToArray();
                if (ids.Length == 0) throw new ArgumentException("the prompt has no tokens");
                long total = Length + ids.Length;
                if (maxNewTokens > 0 && total >= model.ContextLength)
                    throw new ArgumentException(
                        $"{total} tokens and 1 for the answer do not fit into the model's context of {model.ContextLength} tokens");
                var sampler = new Sampler(sampling, read.Concat(ids));
                long count = Math.Min(maxNewTokens, model.ContextLength - total);
                BeginDrafts();
                long[] drafts = Array.Empty<long>();
                float[][] rows = Array.Empty<float[]>();
                for (int at = 0, most = model.Drafts.Most; count-- > 0;)
                {
                    if (at == rows.Length)
                    {
                        long[] next = ids;
                        int wanted = rows.Length == 0 ? 0 : (int)Math.Min(most, count);
                        // A step computes for milliseconds to seconds, which is too long for the caller's thread.
                        (drafts, rows) = await Task.Run(() => Next(next, wanted, cancellationToken)).ConfigureAwait(false);
                        at = 0;
                        Drafted += drafts.Length;
                    }
                    long id = sampler.Choose(rows[at]);
                    ahead = drafts.Length - at;
                    bool over = model.StopTokens.Contains(id);
                    unread = over ? Array.Empty<long>() : new[] { id }; // what follows an answer begins with the token that ends it
                    if (!over && count > 0 && ahead > 0 && drafts[at] == id)
                    {
                        at++;
                        Accepted++;
                    }
                    else
                    {
                        Settle(ids.Concat(drafts.Take(at)).ToArray(), drafts.Length > 0, cancellationToken);
                        if (drafts.Length > 0) most = Math.Min(model.Drafts.Most, Math.Max(1, 2 * at));
                        ids = new[] { id };
                        at = rows.Length;
                    }
                    yield return id;
                    if (over) yield break;
                }
            }
            finally
            {
                lock (gate)
                    if (!disposed) Crop(); // of an answer that was left
                busy = 0;
            }
        }

        /// <summary>Write the tokens that were read, as <c>quantmoe generate --save-state</c> does.</summary>
        /// <remarks>The file has its name when all is there. A symbolic link stays a link.</remarks>
        /// <exception cref="InvalidOperationException">The cache has no tokens, the model no identity, or an answer is being generated.</exception>
        /// <exception cref="IOException">The file cannot be written, or is no saved state: only an earlier one is replaced.</exception>
        /// <exception cref="UnauthorizedAccessException">The file may not be written.</exception>
        public void Save(string path)
        {
            if (path == null) throw new ArgumentNullException(nameof(path));
            Begin();
            try
            {
                lock (gate)
                {
                    ThrowIfDisposed();
                    string identity = model.Value("identity");
                    if (identity == "") throw new InvalidOperationException($"{model.Folder}: no identity in its metadata; export it again");
                    if (Length == 0) throw new InvalidOperationException($"{path}: the cache has no tokens to save");
                    KeepStates(always: true);
                    SavedCache.Save(path, identity, read.ToArray(), inputs, cache, states);
                }
            }
            finally
            {
                busy = 0;
            }
        }

        /// <summary>Cancel an answer that is being generated, wait for its step, and free the cache.</summary>
        public void Dispose()
        {
            lock (run)
            {
                if (!disposed) run.Terminate = closing = true;
            }
            layer?.Dispose();
            lock (gate)
                lock (run)
                {
                    if (disposed) return;
                    disposed = true;
                    binding.Dispose();
                    last?.Dispose();
                    foreach (OrtValue value in cache.Concat(spare).Distinct()) value.Dispose();
                    run.Dispose();
                }
            model.Remove(this);
        }

        void Begin()
        {
            ThrowIfDisposed();
            if (Interlocked.Exchange(ref busy, 1) != 0)
                throw new InvalidOperationException("an answer is being generated: end or dispose of its enumerator first");
        }

        void ThrowIfDisposed()
        {
            if (closing) throw new ObjectDisposedException(nameof(TokenCache));
        }

        /// <summary>Read ids, and return draft tokens with the logits after the last of the ids and after each of them.</summary>
        (long[] Drafts, float[][] Rows) Next(long[] ids, int most, CancellationToken cancellationToken)
        {
            lock (gate)
            {
                ThrowIfDisposed();
                long[] drafts = most > 0 ? Draft(ids[0], most, cancellationToken) : Array.Empty<long>();
                if (drafts.Length == 0) return (drafts, Read(ids, cancellationToken));
                long[] all = ids.Concat(drafts).ToArray(); // the drafts are not unread if the run fails
                Reserve(Length + all.Length);
                return (drafts, Step(all, all.Length, cancellationToken));
            }
        }

        void BeginDrafts()
        {
            Drafted = Accepted = 0;
            layer?.Keep(Array.Empty<long>());
            heard.Clear();
            heardHidden.Clear();
            heardLast = Array.Empty<byte>();
        }

        /// <summary>Return tokens that may follow the tokens that were read and one more.</summary>
        long[] Draft(long last, int most, CancellationToken cancellationToken)
        {
            long begin = Length + 1;
            long end = begin <= model.ShortContext ? Math.Min(model.ShortContext, model.ContextLength) : model.ContextLength;
            int count = (int)Math.Min(most, end - begin);
            if (count < 1) return Array.Empty<long>();
            if (layer != null) return DraftByLayer(last, count, cancellationToken);
            var text = new List<long>(read) { last };
            for (int n = 4; n > 1; n--) // what followed the longest end that was there before, at the latest place
                for (int at = text.Count - 1; at >= n; at--)
                {
                    int same = 0;
                    while (same < n && text[at - 1 - same] == text[text.Count - 1 - same]) same++;
                    if (same == n) return text.Skip(at).Take(count).ToArray();
                }
            return Array.Empty<long>();
        }

        /// <summary>
        /// Return draft tokens of the layer. It gives the token after the next one, from a token's hidden state and the next
        /// token. It goes on from its own hidden state and that token.
        /// </summary>
        long[] DraftByLayer(long last, int count, CancellationToken cancellationToken)
        {
            if (heardLast.Length == 0) return Array.Empty<long>();
            int known = layer!.Length + heard.Count;
            long[] found = new long[count], ids = heard.Append(last).ToArray();
            byte[] states = heardHidden.Concat(heardLast).ToArray();
            heard.Clear();
            heardHidden.Clear();
            for (int i = 0; i < count; i++)
            {
                found[i] = Sampler.Best(layer.Follow(ids, states, 1, cancellationToken)[0]);
                ids = new[] { found[i] };
                states = layer.hidden.AsSpan(layer.hidden.Length - heardLast.Length).ToArray();
            }
            layer.ahead = layer.Length - known;
            lock (layer.gate)
                if (!layer.disposed) layer.Crop();
            return found;
        }

        /// <summary>Take tokens that are certain, whose hidden states are the first ones of the last step.</summary>
        void Hear(long[] ids, CancellationToken cancellationToken)
        {
            if (layer == null) return;
            int width = hidden.Length / lastStep, before = (ids.Length - 1) * width;
            heardHidden.AddRange(heardLast);
            heardHidden.AddRange(hidden.Take(before));
            heard.AddRange(ids.Skip(heardLast.Length == 0 ? 1 : 0));
            heardLast = hidden.AsSpan(before, width).ToArray();
            if (heard.Count < Pending) return;
            layer.Follow(heard.ToArray(), heardHidden.ToArray(), 0, cancellationToken);
            heard.Clear();
            heardHidden.Clear();
        }

        /// <summary>Read ids with hidden states of the model.</summary>
        float[][] Follow(long[] ids, byte[] states, int wanted, CancellationToken cancellationToken)
        {
            lock (gate)
            {
                ThrowIfDisposed();
                Reserve(Length + ids.Length);
                given = states;
                return Step(ids, wanted, cancellationToken);
            }
        }

        /// <summary>Take back draft tokens that are not of the answer; <c>said</c> are the last step's tokens that are.</summary>
        void Settle(long[] said, bool drafted, CancellationToken cancellationToken)
        {
            lock (gate)
            {
                ThrowIfDisposed();
                Crop();
                if (drafted) Hear(said, cancellationToken);
            }
        }

        /// <summary>Go back over the draft tokens at the end, which are of the last step.</summary>
        void Crop()
        {
            if (ahead == 0) return;
            for (int i = 0; i < inputs.Count; i++)
                if (inputs[i].IsState)
                {
                    var piece = inputs[i].Pieces(cache[i], 0);
                    Span<byte> bytes = cache[i].GetTensorMutableRawData();
                    bytes.Slice(piece.Begin - ahead * piece.Bytes, piece.Bytes).CopyTo(bytes.Slice(piece.Begin));
                }
            read.RemoveRange(read.Count - ahead, ahead);
            ahead = 0;
            if (!shares) Replace(Length, Length);
        }

        /// <summary>Read ids, and return the logits after the last of them.</summary>
        float[][] Read(long[] ids, CancellationToken cancellationToken)
        {
            lock (gate)
            {
                ThrowIfDisposed();
                long total = Length + ids.Length;
                if (Length > 0 && Length <= model.ShortContext && total > model.ShortContext)
                {
                    ids = read.Concat(ids).ToArray(); // keys in the cache have the rotary frequencies of short texts
                    Rewind(0);
                }
                Reserve(total);
                long[] before = unread;
                unread = ids;
                float[][] logits = Array.Empty<float[]>();
                try
                {
                    // A hybrid model's prompt ends twice: for the same prompt again, and for one with another end.
                    bool copies = goesBack && ids.Length > 1;
                    int tail = copies && ids.Length > Tail ? ids.Length - Tail : ids.Length;
                    while (unread.Length > 0)
                    {
                        int at = ids.Length - unread.Length;
                        int least = total > model.ShortContext && at == 0 && Length == 0 ? (int)Math.Min(model.ShortContext + 1, ids.Length) : 0;
                        int end = Math.Min(Math.Max(at + Chunk, least), at < tail ? tail : ids.Length);
                        long[] part = ids.Skip(at).Take(end - at).ToArray();
                        logits = Step(part, end == ids.Length ? 1 : 0, cancellationToken);
                        unread = ids.Skip(end).ToArray();
                        Hear(part, cancellationToken);
                        if (copies && (end == tail || end == ids.Length)) KeepStates();
                    }
                }
                catch (OnnxRuntimeException) when (!cancellationToken.IsCancellationRequested && !closing)
                {
                    unread = before; // memory ran out, for example
                    throw;
                }
                return logits;
            }
        }

        /// <summary>Run the model once. Return the logits after the last so many tokens.</summary>
        float[][] Step(long[] ids, int wanted, CancellationToken cancellationToken)
        {
            using OrtValue tokens = Row(ids), mask = Row(Enumerable.Repeat(1L, Length + ids.Length));
            using OrtValue positions = Row(Enumerable.Range(Length, ids.Length).Select(i => (long)i));
            binding.BindInput("input_ids", tokens);
            binding.BindInput("attention_mask", mask);
            binding.BindInput("position_ids", positions);
            using OrtValue? states = given == null ? null : HiddenStates(ids.Length);
            if (states != null) binding.BindInput("hidden_states", states);
            for (int i = 0; i < inputs.Count; i++)
            {
                binding.BindInput(inputs[i].Name, cache[i]);
                if (shares) binding.BindOutput(inputs[i].Present, spare[i]);
                else binding.BindOutputToDevice(inputs[i].Present, OrtMemoryInfo.DefaultInstance);
            }
            binding.BindOutputToDevice("logits", OrtMemoryInfo.DefaultInstance);
            bool givesHidden = layer != null || given != null;
            if (givesHidden) binding.BindOutputToDevice(model.HiddenName, OrtMemoryInfo.DefaultInstance);
            var results = Run(cancellationToken);
            try
            {
                float[][] logits = Logits(results[inputs.Count], wanted);
                if (givesHidden) hidden = results[inputs.Count + 1].GetTensorMutableRawData().ToArray();
                if (shares) (cache, spare) = (spare, cache);
                else
                {
                    IEnumerable<OrtValue> own = last == null ? cache : Enumerable.Empty<OrtValue>();
                    foreach (OrtValue value in own) value.Dispose();
                    last?.Dispose();
                    last = results;
                    cache = spare = results.Take(inputs.Count).ToArray();
                }
                read.AddRange(ids);
                lastStep = ids.Length;
                return logits;
            }
            finally
            {
                if (last != results) results.Dispose();
            }
        }

        IDisposableReadOnlyCollection<OrtValue> Run(CancellationToken cancellationToken)
        {
            try
            {
                cancellationToken.ThrowIfCancellationRequested();
                using (cancellationToken.Register(() => run.Terminate = true)) return model.Session.RunWithBoundResults(run, binding);
            }
            catch (OnnxRuntimeException) when (closing)
            {
                throw new ObjectDisposedException(nameof(TokenCache), "the cache was closed while it generated an answer");
            }
            catch (OnnxRuntimeException) when (cancellationToken.IsCancellationRequested)
            {
                throw new OperationCanceledException(cancellationToken);
            }
            finally
            {
                lock (run) run.Terminate = closing;
            }
        }

        void Rewind(int length)
        {
            if (length == Length) return;
            if (!shares) Replace(length, length);
            for (int i = 0, at = 0; i < inputs.Count; i++)
                if (inputs[i].IsState && length > 0)
                    CopyTo(states[length][at++], cache[i], inputs[i].Pieces(cache[i], 0).Begin);
            read.RemoveRange(length, Length - length);
            foreach (long end in states.Keys.Where(end => end > length).ToArray()) states.Remove(end);
        }

        /// <summary>Make room for so many tokens. It doubles, so that a token's copies cost little.</summary>
        void Reserve(long tokens)
        {
            if (!shares || tokens <= capacity) return;
            long slots = Math.Min(model.ContextLength, Math.Max(tokens, Math.Max(2 * capacity, 256)));
            Replace(slots, Length);
            capacity = slots;
        }

        /// <summary>Make keys and values tensors of so many slots, with the first tokens of the old ones.</summary>
        void Replace(long slots, int length)
        {
            var made = new OrtValue[inputs.Count];
            for (int i = 0; i < inputs.Count; i++)
            {
                CacheInput input = inputs[i];
                if (input.IsState && shares) made[i] = cache[i];
                else Copy(cache[i], made[i] = input.Allocate(slots), input, length);
            }
            OrtValue[] old = last == null ? cache.Where((value, i) => made[i] != value).ToArray() : Array.Empty<OrtValue>();
            cache = made;
            spare = spare.Select((value, i) => shares && inputs[i].IsState ? value : made[i]).ToArray();
            foreach (OrtValue value in old) value.Dispose();
            last?.Dispose();
            last = null;
        }

        static void Copy(OrtValue from, OrtValue to, CacheInput input, int length)
        {
            var (source, target) = (input.Pieces(from, length), input.Pieces(to, length));
            Span<byte> read = from.GetTensorMutableRawData(), written = to.GetTensorMutableRawData();
            for (int i = 0; i < source.Count; i++)
                read.Slice(source.Begin + i * source.Stride, source.Bytes).CopyTo(written.Slice(target.Begin + i * target.Stride));
        }

        static void CopyTo(byte[] from, OrtValue to, int begin) => from.CopyTo(to.GetTensorMutableRawData().Slice(begin));

        void KeepStates(bool always = false)
        {
            if (model.HasStates && (goesBack || always) && Length > 0) states[Length] = SavedCache.States(inputs, cache);
            while (states.Count > MostStates) states.Remove(states.Keys.First());
        }

        static OrtValue Row(IEnumerable<long> values)
        {
            long[] row = values.ToArray();
            return OrtValue.CreateTensorValueFromMemory(row, new long[] { 1, row.Length });
        }

        OrtValue HiddenStates(int tokens)
        {
            NodeMetadata info = model.Session.InputMetadata["hidden_states"];
            var made = OrtValue.CreateAllocatedTensorValue(
                OrtAllocator.DefaultInstance, info.ElementDataType, new long[] { 1, tokens, info.Dimensions[2] });
            given.CopyTo(made.GetTensorMutableRawData());
            return made;
        }

        /// <summary>Return the numbers at the last so many positions of logits [1, sequence, vocabulary].</summary>
        static float[][] Logits(OrtValue value, int count)
        {
            var info = value.GetTensorTypeAndShape();
            var found = new float[count][];
            int size = checked((int)info.Shape[2]), from = checked((int)(info.ElementCount - (long)count * size));
            for (int row = 0; row < count; row++) found[row] = Row(value, info.ElementDataType, from + row * size, size);
            return found;
        }

        static float[] Row(OrtValue value, TensorElementType type, int from, int size)
        {
            var found = new float[size];
            if (type == TensorElementType.Float) value.GetTensorDataAsSpan<float>().Slice(from, size).CopyTo(found);
            else if (type == TensorElementType.Float16)
            {
                var numbers = value.GetTensorDataAsSpan<Float16>().Slice(from);
                for (int i = 0; i < size; i++) found[i] = numbers[i].ToFloat();
            }
            else if (type == TensorElementType.BFloat16)
            {
                var numbers = value.GetTensorDataAsSpan<BFloat16>().Slice(from);
                for (int i = 0; i < size; i++) found[i] = numbers[i].ToFloat();
            }
            else throw new InvalidDataException($"logits are {type}, expected Float, Float16 or BFloat16");
            foreach (float number in found)
                if (float.IsNaN(number) || float.IsInfinity(number)) throw new InvalidDataException("logits are not finite");
            return found;
        }
    }
}
