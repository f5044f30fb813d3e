using System;
using System.Collections.Generic;
using System.Linq;
using System.Runtime.CompilerServices;
using System.Threading;
using System.Threading.Tasks;

namespace QuantMoe
{
    /// <summary>Tokens of an answer, and why it ended.</summary>
    public sealed class ReplyInfo
    {
        internal ReplyInfo(int promptTokens, int keptTokens) => (PromptTokens, KeptTokens) = (promptTokens, keptTokens);

        /// <summary>Tokens of the conversation before the answer.</summary>
        public int PromptTokens { get; }

        /// <summary>Those of them that the cache had already.</summary>
        public int KeptTokens { get; }

        /// <summary>Tokens of the answer.</summary>
        public int Tokens { get; internal set; }

        /// <summary>Draft tokens that were verified.</summary>
        public int Drafted { get; internal set; }

        /// <summary>The draft tokens that are part of the answer.</summary>
        public int Accepted { get; internal set; }

        /// <summary>Whether the model or a stop string ended the answer, and not the number of tokens.</summary>
        public bool Stopped { get; internal set; }
    }

    /// <summary>A conversation with an exported model. Messages that were read stay in the KV cache.</summary>
    /// <remarks>
    /// Answers are kept as their tokens. If the context is full, the oldest messages are dropped with their answers. A system
    /// prompt stays. A model without a chat template goes on from each message.
    /// </remarks>
    public sealed class Chat : IDisposable
    {
        internal sealed class Turn
        {
            public string Message = "";
            public string? Text; // of an answer that came as text
            public List<long> Answer = new List<long>();
        }

        readonly Generator model;
        readonly Func<IReadOnlyList<long>, TokenCache> begin;
        TokenCache? cache;
        bool disposed;
        readonly string? system;
        readonly ChatTemplate? template; // of a model whose turns are more than text around messages
        readonly bool raw;
        readonly List<Turn> turns;

        /// <summary>Begin a conversation.</summary>
        /// <param name="model">The model that answers.</param>
        /// <param name="system">A system prompt.</param>
        /// <param name="raw">Ignore the model's chat template.</param>
        /// <exception cref="NotSupportedException">The model takes no system prompt.</exception>
        /// <exception cref="System.IO.FileNotFoundException">The folder has no tokenizer.json.</exception>
        /// <exception cref="System.IO.InvalidDataException">The chat template is missing or damaged.</exception>
        public Chat(Generator model, string? system = null, bool raw = false)
            : this(model, system, raw, new List<Turn>(), ids => new TokenCache(model))
        {
        }

        internal Chat(Generator model, string? system, bool raw, List<Turn> turns, Func<IReadOnlyList<long>, TokenCache> begin)
        {
            this.model = model ?? throw new ArgumentNullException(nameof(model));
            if (!raw && model.Metadata.ContainsKey("no_chat")) template = model.Template;
            this.raw = raw || (template == null && !model.Metadata.ContainsKey("chat.begin"));
            if (system != null && (this.raw || (template == null && !model.Metadata.ContainsKey("chat.system"))))
                throw new NotSupportedException($"{model.Folder}: the model takes no system prompt; put it into the first message");
            this.system = system;
            this.turns = turns;
            this.begin = begin;
            _ = model.Tokenizer; // fails now if there is none
        }

        /// <summary>Tokens of the last answer; null before the first answer.</summary>
        public ReplyInfo? Last { get; private set; }

        /// <summary>Return the model's answer in pieces, as they come.</summary>
        /// <remarks>The pieces that came are part of the conversation, also if you stop early or cancel.</remarks>
        /// <param name="message">The user's text.</param>
        /// <param name="maxNewTokens">The most tokens of the answer.</param>
        /// <param name="sampling">How tokens are chosen; null: as the model's makers recommend.</param>
        /// <param name="stop">Strings that end the answer; they are not part of it.</param>
        /// <param name="cancellationToken">Ends the answer within a step.</param>
        /// <exception cref="ArgumentException">The message alone does not fit into the context.</exception>
        /// <exception cref="InvalidOperationException">Another answer is being generated.</exception>
        /// <exception cref="ObjectDisposedException">The conversation is closed, or was closed meanwhile.</exception>
        /// <exception cref="OperationCanceledException">It was cancelled.</exception>
        public IAsyncEnumerable<string> ReplyAsync(string message, int maxNewTokens = 512, Sampling? sampling = null,
            IEnumerable<string>? stop = null, CancellationToken cancellationToken = default)
        {
            if (message == null) throw new ArgumentNullException(nameof(message));
            if (maxNewTokens < 0) throw new ArgumentOutOfRangeException(nameof(maxNewTokens), $"maxNewTokens is {maxNewTokens}, expected a number from 0");
            sampling ??= model.Sampling;
            sampling.Check();
            return Pieces(message, maxNewTokens, sampling, stop ?? Enumerable.Empty<string>(), cancellationToken);
        }

        async IAsyncEnumerable<string> Pieces(string message, int maxNewTokens, Sampling sampling, IEnumerable<string> stop,
            [EnumeratorCancellation] CancellationToken cancellationToken)
        {
            var turn = new Turn { Message = message };
            int dropped = 0;
            long[] ids = Ids(turn, 0);
            while (ids.Length + Math.Min(maxNewTokens, model.ContextLength / 4) > model.ContextLength && dropped < turns.Count)
                ids = Ids(turn, ++dropped);
            TokenCache cache = Cache(ids);
            int kept = cache.Keep(ids);
            var stream = new TextStream(model.Tokenizer, stop, raw ? ids : null);
            var tokens = cache.GenerateAsync(ids.Skip(kept).ToArray(), maxNewTokens, sampling, cancellationToken);
            if (ids.Length < model.ContextLength)
            {
                turns.RemoveRange(0, dropped);
                turns.Add(turn);
            }
            var info = Last = new ReplyInfo(ids.Length, kept);
            await foreach (long id in tokens.ConfigureAwait(false))
            {
                info.Tokens++;
                (info.Drafted, info.Accepted) = (cache.Drafted, cache.Accepted);
                if (info.Stopped = model.StopTokens.Contains(id)) break;
                turn.Answer.Add(id);
                string piece = stream.Push(id);
                info.Stopped = stream.Stopped;
                if (piece != "") yield return piece;
                if (stream.Stopped) yield break;
            }
            string rest = stream.End();
            info.Stopped |= stream.Stopped;
            if (rest != "") yield return rest;
        }

        /// <summary>Return the tokens of the conversation after its oldest turns, with a new message.</summary>
        long[] Ids(Turn last, int dropped)
        {
            var ids = new List<long>();
            var messages = new List<string>();
            foreach (Turn turn in turns.Skip(dropped).Concat(new[] { last }))
            {
                messages.Add(turn.Message);
                if (template != null) ids.AddRange(model.Tokenizer.Encode(template.Turn(system, messages), special: false));
                else if (raw) ids.AddRange(model.Tokenizer.Encode(turn.Message, special: ids.Count == 0));
                else
                {
                    string before = ids.Count > 0 ? model.Value("chat.next")
                        : system == null ? model.Value("chat.begin")
                        : model.Value("chat.system") + system + model.Value("chat.system_end");
                    ids.AddRange(model.Tokenizer.Encode(before + turn.Message + model.Value("chat.reply"), special: false));
                }
                ids.AddRange(turn.Answer);
            }
            return ids.ToArray();
        }

        TokenCache Cache(long[] ids)
        {
            lock (turns)
            {
                if (disposed) throw new ObjectDisposedException(nameof(Chat));
                return cache ??= begin(ids);
            }
        }

        /// <summary>Cancel an answer that is being generated, wait for its step, and free the cache.</summary>
        public void Dispose()
        {
            lock (turns) disposed = true;
            cache?.Dispose();
        }
    }
}
