using System;
using System.Collections.Generic;
using System.Linq;
using System.Runtime.CompilerServices;
using System.Threading;
using System.Threading.Tasks;
using Microsoft.Extensions.AI;

namespace QuantMoe
{
    /// <summary>Microsoft.Extensions.AI's chat client for an exported model. Any number of threads may use it.</summary>
    /// <remarks>
    /// A request repeats its conversation. The client keeps the caches of its last conversations, so that a request runs only
    /// what is new. A conversation may begin with the assistant's greeting, which then answers an empty message.
    /// </remarks>
    public sealed class QuantMoeChatClient : IChatClient
    {
        readonly Generator model;
        readonly int mostCaches;
        readonly List<TokenCache> idle = new List<TokenCache>();
        readonly HashSet<Chat> open = new HashSet<Chat>();
        bool disposed;

        /// <summary>Answer with a model, which the caller disposes of after the client.</summary>
        /// <param name="model">The model that answers.</param>
        /// <param name="mostCaches">The most conversations whose caches are kept between requests.</param>
        public QuantMoeChatClient(Generator model, int mostCaches = 4)
        {
            this.model = model ?? throw new ArgumentNullException(nameof(model));
            if (mostCaches < 0) throw new ArgumentOutOfRangeException(nameof(mostCaches), $"mostCaches is {mostCaches}, expected a number from 0");
            this.mostCaches = mostCaches;
        }

        /// <inheritdoc/>
        public async Task<ChatResponse> GetResponseAsync(IEnumerable<ChatMessage> messages, ChatOptions? options = null,
            CancellationToken cancellationToken = default) =>
            await GetStreamingResponseAsync(messages, options, cancellationToken).ToChatResponseAsync(cancellationToken).ConfigureAwait(false);

        /// <inheritdoc/>
        /// <exception cref="NotSupportedException">A message or an option that the model cannot follow.</exception>
        public IAsyncEnumerable<ChatResponseUpdate> GetStreamingResponseAsync(IEnumerable<ChatMessage> messages,
            ChatOptions? options = null, CancellationToken cancellationToken = default)
        {
            if (messages == null) throw new ArgumentNullException(nameof(messages));
            Refuse(options);
            string? system = options?.Instructions;
            List<Chat.Turn> turns = Turns(messages, ref system);
            Sampling sampling = Chosen(options);
            return Updates(turns, system, options, sampling, cancellationToken);
        }

        async IAsyncEnumerable<ChatResponseUpdate> Updates(List<Chat.Turn> turns, string? system, ChatOptions? options, Sampling sampling,
            [EnumeratorCancellation] CancellationToken cancellationToken)
        {
            Chat.Turn last = turns[turns.Count - 1];
            turns.RemoveAt(turns.Count - 1);
            TokenCache? cache = null;
            var chat = new Chat(model, system, raw: false, turns, ids => cache = Take(ids));
            lock (idle)
            {
                if (disposed) throw new ObjectDisposedException(nameof(QuantMoeChatClient));
                open.Add(chat);
            }
            string id = Guid.NewGuid().ToString("N");
            ChatResponseUpdate Update() => new ChatResponseUpdate
            {
                Role = ChatRole.Assistant, ResponseId = id, MessageId = id, ModelId = model.Folder, CreatedAt = DateTimeOffset.UtcNow,
            };
            try
            {
                var pieces = chat.ReplyAsync(
                    last.Message, options?.MaxOutputTokens ?? 512, sampling, options?.StopSequences, cancellationToken);
                await foreach (string piece in pieces.ConfigureAwait(false))
                {
                    ChatResponseUpdate update = Update();
                    update.Contents.Add(new TextContent(piece));
                    yield return update;
                }
                ReplyInfo info = chat.Last!;
                ChatResponseUpdate end = Update();
                end.FinishReason = info.Stopped ? ChatFinishReason.Stop : ChatFinishReason.Length;
                end.Contents.Add(new UsageContent(new UsageDetails
                {
                    InputTokenCount = info.PromptTokens,
                    OutputTokenCount = info.Tokens,
                    TotalTokenCount = info.PromptTokens + info.Tokens,
                }));
                yield return end;
            }
            finally
            {
                Give(chat, cache);
            }
        }

        /// <summary>Return an idle cache that shares most tokens with a text, or an empty cache.</summary>
        TokenCache Take(IReadOnlyList<long> ids)
        {
            lock (idle)
            {
                if (disposed) throw new ObjectDisposedException(nameof(QuantMoeChatClient));
                TokenCache? best = idle.OrderByDescending(cache => cache.Shared(ids)).FirstOrDefault();
                if (best == null || (best.Shared(ids) == 0 && idle.Count < mostCaches)) return new TokenCache(model, goesBack: true);
                idle.Remove(best);
                return best;
            }
        }

        void Give(Chat chat, TokenCache? cache)
        {
            lock (idle)
            {
                open.Remove(chat);
                if (cache != null && !disposed && idle.Count < mostCaches) idle.Add(cache);
                else cache?.Dispose();
            }
        }

        Sampling Chosen(ChatOptions? options)
        {
            Sampling sampling = model.Sampling.Copy();
            if (options?.Temperature is float temperature) sampling.Temperature = temperature;
            if (options?.TopK is int topK) sampling.TopK = topK;
            if (options?.TopP is float topP) sampling.TopP = topP;
            if (options?.PresencePenalty is float presence) sampling.PresencePenalty = presence;
            if (options?.FrequencyPenalty is float frequency) sampling.FrequencyPenalty = frequency;
            if (options?.Seed is long seed) sampling.Seed = unchecked((int)(seed ^ seed >> 32));
            sampling.Check();
            return sampling;
        }

        static void Refuse(ChatOptions? options)
        {
            if (options == null) return;
            void If(bool set, string name, string instead)
            {
                if (set) throw new NotSupportedException($"ChatOptions.{name} is set, which QuantMoe does not support: {instead}");
            }
            If(options.Tools?.Count > 0, nameof(options.Tools), "describe the tools in a message");
            If(options.ToolMode is RequiredChatToolMode, nameof(options.ToolMode), "there are no tools");
            If(options.ResponseFormat is ChatResponseFormatJson, nameof(options.ResponseFormat), "ask for JSON in a message");
            If(options.ConversationId != null, nameof(options.ConversationId), "repeat the conversation in each request");
            foreach (string name in options.AdditionalProperties?.Keys ?? Enumerable.Empty<string>())
                If(true, $"{nameof(options.AdditionalProperties)}[\"{name}\"]", "leave it out");
        }

        /// <summary>Return the messages of users with their answers; the last one waits for its answer.</summary>
        List<Chat.Turn> Turns(IEnumerable<ChatMessage> messages, ref string? system)
        {
            var turns = new List<Chat.Turn>();
            foreach (ChatMessage message in messages)
            {
                foreach (AIContent content in message.Contents)
                    if (!(content is TextContent || content is TextReasoningContent || content is UsageContent))
                        throw new NotSupportedException($"a message has {content.GetType().Name}, expected text");
                string text = string.Concat(message.Contents.OfType<TextContent>().Select(content => content.Text));
                if (message.Role == ChatRole.System && turns.Count == 0) system = system == null ? text : system + "\n\n" + text;
                else if (message.Role == ChatRole.Assistant && turns.Count > 0 && turns[turns.Count - 1].Text == null)
                    turns[turns.Count - 1].Text = text;
                else if (message.Role == ChatRole.Assistant && turns.Count == 0) turns.Add(new Chat.Turn { Text = text }); // a greeting
                else if (message.Role == ChatRole.User && (turns.Count == 0 || turns[turns.Count - 1].Text != null))
                    turns.Add(new Chat.Turn { Message = text });
                else
                    throw new NotSupportedException(
                        $"a message of {message.Role.Value} after {turns.Count} of users, expected system first, then user and assistant in turn");
            }
            if (turns.Count == 0 || turns[turns.Count - 1].Text != null)
                throw new NotSupportedException("the last message is not the user's, expected a message to answer");
            foreach (Chat.Turn turn in turns.Where(turn => turn.Text != null))
                turn.Answer.AddRange(model.Tokenizer.Encode(turn.Text!, special: false));
            return turns;
        }

        /// <inheritdoc/>
        public object? GetService(Type serviceType, object? serviceKey = null)
        {
            if (serviceType == null) throw new ArgumentNullException(nameof(serviceType));
            if (serviceKey != null) return null;
            return serviceType == typeof(ChatClientMetadata) ? new ChatClientMetadata("quantmoe", defaultModelId: model.Folder)
                : serviceType.IsInstanceOfType(this) ? this
                : serviceType.IsInstanceOfType(model) ? model : (object?)null;
        }

        /// <summary>Cancel answers that are being generated, wait for their steps, and free the caches. The model stays open.</summary>
        public void Dispose()
        {
            IDisposable[] all;
            lock (idle)
            {
                if (disposed) return;
                disposed = true;
                all = open.Cast<IDisposable>().Concat(idle).ToArray();
                idle.Clear();
            }
            foreach (IDisposable one in all) one.Dispose();
        }
    }
}
