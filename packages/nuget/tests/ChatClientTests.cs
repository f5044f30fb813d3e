using System;
using System.Collections.Generic;
using System.Linq;
using System.Threading;
using System.Threading.Tasks;
using Microsoft.Extensions.AI;
using Xunit;

namespace QuantMoe.Tests;

public class ChatClientTests
{
    static readonly ChatOptions greedy = new ChatOptions { Temperature = 0, MaxOutputTokens = 8 };

    [Theory, InlineData("plain"), InlineData("hybrid")]
    public async Task RequestsThatRepeatAConversationGiveItsAnswers(string name)
    {
        using var folder = new Temporary();
        using var model = new Generator(folder.Model(Models.Of(name), Models.Turns));
        using IChatClient client = new QuantMoeChatClient(model);
        using var chat = new Chat(model, system: "Be kind.");
        var messages = new List<ChatMessage> { new(ChatRole.System, "Be kind.") };
        foreach (string message in new[] { "Who are you?", "Whence?", "Why?" })
        {
            string expected = string.Concat(await Models.All(chat.ReplyAsync(message, 8, Sampling.Greedy)));
            messages.Add(new ChatMessage(ChatRole.User, message));
            ChatResponse response = await client.GetResponseAsync(messages, greedy);
            Assert.Equal(expected, response.Text);
            Assert.Equal((chat.Last!.PromptTokens, chat.Last.Tokens), (response.Usage!.InputTokenCount, response.Usage.OutputTokenCount));
            Assert.Equal(chat.Last.Stopped ? ChatFinishReason.Stop : ChatFinishReason.Length, response.FinishReason);
            messages.AddMessages(response);
        }
    }

    [Fact]
    public async Task ManyCallersStreamAtOnce()
    {
        using var model = new Generator(Models.Plain, options => options.IntraOpNumThreads = 1);
        using IChatClient client = new QuantMoeChatClient(model, mostCaches: 2);
        async Task<string> Answer(int i) => string.Concat(
            (await Models.All(client.GetStreamingResponseAsync("The house number " + i, greedy))).Select(update => update.Text));
        string[] alone = new string[8];
        for (int i = 0; i < 8; i++) alone[i] = await Answer(i);
        for (int round = 0; round < 3; round++)
            Assert.Equal(alone, await Task.WhenAll(Enumerable.Range(0, 8).Select(i => Task.Run(() => Answer(i)))));
    }

    [Fact]
    public async Task OptionsWork()
    {
        using var model = new Generator(Models.Plain);
        using IChatClient client = new QuantMoeChatClient(model);
        async Task<string> Text(ChatOptions options) => (await client.GetResponseAsync("The old house", options)).Text;
        string whole = await Text(new ChatOptions { Temperature = 0, MaxOutputTokens = 24 });
        Assert.Equal(whole, await Text(new ChatOptions { TopK = 1, MaxOutputTokens = 24 }));
        Assert.Equal(whole, await Text(new ChatOptions { TopP = 1e-9f, MaxOutputTokens = 24 }));
        string stop = whole.Substring(whole.Length / 2, 5);
        Assert.Equal(whole.Substring(0, whole.IndexOf(stop, StringComparison.Ordinal)),
            await Text(new ChatOptions { Temperature = 0, MaxOutputTokens = 24, StopSequences = [stop] }));
        Assert.Equal(await Text(new ChatOptions { Seed = 5, MaxOutputTokens = 24 }), await Text(new ChatOptions { Seed = 5, MaxOutputTokens = 24 }));
        Assert.NotEqual(whole, await Text(new ChatOptions { Temperature = 0, FrequencyPenalty = 1e6f, MaxOutputTokens = 24 }));
        Assert.NotEqual(whole, await Text(new ChatOptions { Temperature = 0, PresencePenalty = 1e6f, MaxOutputTokens = 24 }));
    }

    [Fact]
    public void OtherOptionsAreRefusedByName()
    {
        using var model = new Generator(Models.Plain);
        using IChatClient client = new QuantMoeChatClient(model);
        var refused = new Dictionary<string, ChatOptions>
        {
            ["ChatOptions.Tools"] = new() { Tools = [AIFunctionFactory.Create(() => 1, "one")] },
            ["ChatOptions.ResponseFormat"] = new() { ResponseFormat = ChatResponseFormat.Json },
            ["ChatOptions.ConversationId"] = new() { ConversationId = "1" },
            ["ChatOptions.AdditionalProperties[\"min_p\"]"] = new() { AdditionalProperties = new() { ["min_p"] = 0.1 } },
        };
        foreach (var (name, options) in refused)
            Assert.StartsWith(name + " is set", Assert.Throws<NotSupportedException>(() => client.GetStreamingResponseAsync("Hi", options)).Message);
        Assert.Throws<ArgumentOutOfRangeException>(() => client.GetStreamingResponseAsync("Hi", new ChatOptions { Temperature = -1 }));
        ChatMessage image = new(ChatRole.User, [new DataContent("data:image/png;base64,AA==")]);
        Assert.Contains("DataContent", Assert.Throws<NotSupportedException>(() => client.GetStreamingResponseAsync([image])).Message);
        ChatMessage answer = new(ChatRole.Assistant, "Hello");
        Assert.Contains("is not the user's", Assert.Throws<NotSupportedException>(() => client.GetStreamingResponseAsync([answer])).Message);
        Assert.Contains("of assistant after 1",
            Assert.Throws<NotSupportedException>(() => client.GetStreamingResponseAsync([answer, answer])).Message);
    }

    [Fact]
    public async Task AConversationBeginsWithAGreeting()
    {
        using var folder = new Temporary();
        using var model = new Generator(folder.Model(Models.Plain, Models.Turns));
        using IChatClient client = new QuantMoeChatClient(model);
        long[] ids = [.. model.Tokenizer.Encode("Q: \nA:", false), .. model.Tokenizer.Encode("Hello", false), .. model.Tokenizer.Encode("\nQ: Who?\nA:", false)];
        ChatResponse response = await client.GetResponseAsync([new(ChatRole.Assistant, "Hello"), new(ChatRole.User, "Who?")], greedy);
        Assert.Equal(ids.Length, response.Usage!.InputTokenCount);
        Assert.Equal(model.Tokenizer.Decode((await Models.Fresh(model, ids, 8)).Where(id => !model.StopTokens.Contains(id)).ToArray()), response.Text);
    }

    [Fact]
    public async Task CancelAndDisposeEndAnswers()
    {
        using var model = new Generator(Models.Plain);
        var client = new QuantMoeChatClient(model);
        var options = new ChatOptions { MaxOutputTokens = 100000 };
        using var source = new CancellationTokenSource();
        await Assert.ThrowsAnyAsync<OperationCanceledException>(async () =>
        {
            await foreach (var update in client.GetStreamingResponseAsync([new(ChatRole.User, "Then said")], options, source.Token)) source.Cancel();
        });
        Task<ChatResponse> response = client.GetResponseAsync([new(ChatRole.User, "Then said")], options);
        await Task.Delay(30);
        client.Dispose();
        await Assert.ThrowsAsync<ObjectDisposedException>(() => response);
        await Assert.ThrowsAsync<ObjectDisposedException>(() => client.GetResponseAsync([new(ChatRole.User, "Then said")]));
        Assert.NotEmpty(await Models.Fresh(model, [1, 2], 2)); // the model stays open
    }
}
