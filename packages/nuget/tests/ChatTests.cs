using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Text.Json.Nodes;
using System.Threading;
using System.Threading.Tasks;
using Xunit;

namespace QuantMoe.Tests;

public class ChatTests
{
    static async Task<string> Said(IAsyncEnumerable<string> pieces) => string.Concat(await Models.All(pieces));

    [Fact]
    public async Task TextGoesOn()
    {
        using var model = new Generator(Models.Plain);
        using var chat = new Chat(model);
        long[] ids = model.Tokenizer.Encode("Then said the captain", special: true);
        string expected = model.Tokenizer.Decode(await Models.Fresh(model, ids, 12));
        Assert.Equal(expected, await Said(chat.ReplyAsync("Then said the captain", 12, Sampling.Greedy)));
        Assert.Equal((ids.Length, 0, 12, false), (chat.Last!.PromptTokens, chat.Last.KeptTokens, chat.Last.Tokens, chat.Last.Stopped));
    }

    [Theory, InlineData("plain"), InlineData("hybrid")]
    public async Task TurnsAreOnePromptOfAll(string name)
    {
        using var folder = new Temporary();
        using var model = new Generator(folder.Model(Models.Of(name), Models.Turns));
        using var chat = new Chat(model, system: "Be kind.");
        var ids = new List<long>();
        string before = "S: Be kind.\nQ: ";
        foreach (string message in new[] { "Who are you?", "Whence?", "Why?" })
        {
            ids.AddRange(model.Tokenizer.Encode(before + message + "\nA:", special: false));
            List<long> answer = await Models.Fresh(model, ids, 8);
            string expected = model.Tokenizer.Decode(answer.Where(id => !model.StopTokens.Contains(id)));
            Assert.Equal(expected, await Said(chat.ReplyAsync(message, 8, Sampling.Greedy)));
            Assert.Equal(ids.Count, chat.Last!.PromptTokens);
            Assert.True(before[0] == 'S' || chat.Last.KeptTokens > 0);
            ids.AddRange(answer.Where(id => !model.StopTokens.Contains(id)));
            before = "\nQ: ";
        }
    }

    [Fact]
    public async Task AnAnswerThatEndsWithinACharacterGoesOn()
    {
        using var model = new Generator(Models.Plain);
        var ids = new List<long>(model.Tokenizer.Encode("Then said", special: true));
        var any = new Sampling { Temperature = 1000, TopK = 0 };
        List<long> answer = [];
        for (int seed = 0; model.Tokenizer.Decode(answer) != "\uFFFD" && seed < 1000; ++seed)
        {
            any.Seed = seed;
            using var cache = new TokenCache(model);
            answer = await Models.All(cache.GenerateAsync(ids, 1, any));
        }
        using var chat = new Chat(model);
        Assert.Equal("\uFFFD", await Said(chat.ReplyAsync("Then said", 1, any)));
        ids = [.. ids, .. answer, .. model.Tokenizer.Encode(" the captain", special: false)];
        string expected = model.Tokenizer.Decode(await Models.Fresh(model, ids, 8));
        Assert.Equal(expected, await Said(chat.ReplyAsync(" the captain", 8, Sampling.Greedy)));
        Assert.Equal(ids.Count, chat.Last!.PromptTokens);
    }

    [Fact]
    public async Task ATemplateIsRenderedWhereThereAreNoTurns()
    {
        using var folder = new Temporary();
        string made = folder.Model(Models.Hybrid, new Dictionary<string, string> { ["no_chat"] = "the template counts messages" });
        File.WriteAllText(Path.Combine(made, "chat_template.jinja"), """
            {%- for m in messages %}
                {%- set users = messages[: loop.index] | selectattr('role', 'equalto', 'user') | list | length %}
                {{- m.content if m.role != 'user' else '|' ~ users ~ ' ' ~ m.content ~ '\nA:' }}
            {%- endfor %}
            """);
        using var model = new Generator(made);
        using var chat = new Chat(model, system: "Be kind.");
        var ids = new List<long>();
        foreach (var (text, message) in new[] { ("Be kind.|1 Wérs 日本?\nA:", "Wérs 日本?"), ("|2 Whence?\nA:", "Whence?"), ("|3 Why?\nA:", "Why?") })
        {
            ids.AddRange(model.Tokenizer.Encode(text, special: false));
            long[] answer = (await Models.Fresh(model, ids, 8)).Where(id => !model.StopTokens.Contains(id)).ToArray();
            Assert.Equal(model.Tokenizer.Decode(answer), await Said(chat.ReplyAsync(message, 8, Sampling.Greedy)));
            Assert.Equal(ids.Count, chat.Last!.PromptTokens);
            ids.AddRange(answer);
        }
        File.WriteAllText(Path.Combine(made, "chat_template.jinja"), "{{ raise_exception('only ' ~ 'tools') }}");
        using var other = new Generator(made);
        using var refused = new Chat(other);
        Assert.EndsWith("chat_template.jinja: invalid operation: only tools (in chat:1)",
            (await Assert.ThrowsAsync<InvalidDataException>(() => Said(refused.ReplyAsync("Why?")))).Message);
    }

    [Fact]
    public void SpecialTokensAreAddedAndLeftByASwitchEach()
    {
        using var folder = new Temporary();
        JsonNode json = JsonNode.Parse(File.ReadAllText(Path.Combine(Models.Plain, "tokenizer.json")))!;
        json["post_processor"] = JsonNode.Parse("""
            {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [0], "tokens": ["</s>"]}}}
            """);
        File.WriteAllText(folder["tokenizer.json"], json.ToJsonString());
        var tokenizer = new TextTokenizer(folder.Path);
        long[] ids = tokenizer.Encode("a b", special: true);
        Assert.Equal([0, .. tokenizer.Encode("a b", special: false)], ids);
        Assert.Equal("a b", tokenizer.Decode(ids).TrimStart());
        Assert.Equal("</s>" + tokenizer.Decode(ids), tokenizer.Decode(ids, special: true));
        Assert.Contains("-1: expected a token id", Assert.Throws<InvalidDataException>(() => tokenizer.Decode([-1])).Message);
        tokenizer.Dispose();
        Assert.Throws<ObjectDisposedException>(() => tokenizer.Decode(ids));
    }

    [Fact]
    public async Task OldestTurnsAreDroppedWhereTheContextIsFull()
    {
        using var folder = new Temporary();
        var context = new KeyValuePair<string, string>("context_length", "64");
        using var model = new Generator(folder.Model(Models.Hybrid, Models.Turns.Append(context)));
        Assert.Equal(64, model.ContextLength);
        using var chat = new Chat(model, system: "Be kind.");
        for (int i = 0; i < 8; i++)
        {
            Assert.NotEmpty(await Models.All(chat.ReplyAsync("And then?", 12, Sampling.Greedy)));
            Assert.InRange(chat.Last!.PromptTokens + 12, 1, 64);
        }
        string large = string.Concat(Enumerable.Repeat("Then said the captain of the host. ", 20));
        Assert.Contains("do not fit into the model's context of 64 tokens",
            (await Assert.ThrowsAsync<ArgumentException>(() => Said(chat.ReplyAsync(large, 12, Sampling.Greedy)))).Message);
        Assert.NotEmpty(await Models.All(chat.ReplyAsync("And then?", 12, Sampling.Greedy)));
    }

    [Fact]
    public async Task StopStringsEndAnAnswer()
    {
        using var model = new Generator(Models.Plain);
        using var whole = new Chat(model);
        string text = await Said(whole.ReplyAsync("Then said the captain", 24, Sampling.Greedy));
        string stop = text.Substring(text.Length / 2, 6);
        using var chat = new Chat(model);
        string found = await Said(chat.ReplyAsync("Then said the captain", 24, Sampling.Greedy, stop: ["never", stop]));
        Assert.Equal(text.Substring(0, text.IndexOf(stop, StringComparison.Ordinal)), found);
        Assert.True(chat.Last!.Stopped);
    }

    [Fact]
    public async Task AnAnswerThatIsCancelledStaysAndTheChatGoesOn()
    {
        using var model = new Generator(Models.Hybrid);
        using var chat = new Chat(model);
        using var source = new CancellationTokenSource();
        string said = "";
        await Assert.ThrowsAnyAsync<OperationCanceledException>(async () =>
        {
            await foreach (string piece in chat.ReplyAsync("Then said the captain", 1000, Sampling.Greedy, cancellationToken: source.Token))
                if ((said += piece).Length > 10) source.Cancel();
        });
        Assert.NotEmpty(said);
        Assert.NotEmpty(await Models.All(chat.ReplyAsync(" And", 4, Sampling.Greedy)));
        Assert.True(chat.Last!.KeptTokens > 0);
    }

    [Fact]
    public async Task DisposeDuringAnAnswerEndsItByName()
    {
        using var model = new Generator(Models.Plain);
        var chat = new Chat(model);
        Task<string> answer = Said(chat.ReplyAsync("Then said", 100000, Sampling.Greedy));
        await Task.Delay(30);
        model.Dispose();
        await Assert.ThrowsAsync<ObjectDisposedException>(() => answer);
        await Assert.ThrowsAsync<ObjectDisposedException>(() => Said(chat.ReplyAsync("Then said")));
        chat.Dispose();
    }

    [Fact]
    public async Task SamplingFollowsItsSeedAndItsLimits()
    {
        using var model = new Generator(Models.Plain);
        Assert.Equal((0.8, 50, 0.95), (model.Sampling.Temperature, model.Sampling.TopK, model.Sampling.TopP)); // generation_config.json
        async Task<string> Text(Sampling? sampling)
        {
            using var chat = new Chat(model);
            return await Said(chat.ReplyAsync("The old house", 16, sampling));
        }
        string greedy = await Text(Sampling.Greedy);
        Assert.Equal(greedy, await Text(new Sampling { TopK = 1 }));
        Assert.Equal(greedy, await Text(new Sampling { TopK = 0, TopP = 1e-9 }));
        Assert.Equal(greedy, await Text(new Sampling { TopK = 0, MinP = 1 }));
        Assert.Equal(await Text(new Sampling { Seed = 7 }), await Text(new Sampling { Seed = 7 }));
        Assert.True((await Task.WhenAll(Enumerable.Range(0, 8).Select(seed => Text(new Sampling { Seed = seed })))).Distinct().Count() > 4);
        Assert.NotEqual(greedy, await Text(new Sampling { Temperature = 0, RepetitionPenalty = 1e6 }));
        Assert.NotEqual(greedy, await Text(new Sampling { Temperature = 0, PresencePenalty = 1e6 }));
        Assert.NotEqual(greedy, await Text(new Sampling { Temperature = 0, FrequencyPenalty = 1e6 }));
    }

    [Fact]
    public async Task TopKKeepsSoManyTokens()
    {
        using var model = new Generator(Models.Plain);
        async Task<HashSet<long>> First(Sampling of)
        {
            var found = new HashSet<long>();
            for (int seed = 0; seed < 150; seed++)
            {
                of.Seed = seed;
                using var cache = new TokenCache(model);
                found.Add((await Models.All(cache.GenerateAsync([1, 2, 3], 1, of)))[0]);
            }
            return found;
        }
        Assert.Equal(3, (await First(new Sampling { TopK = 3, Temperature = 5 })).Count);
        Assert.InRange((await First(new Sampling { TopK = 0, Temperature = 5 })).Count, 100, 150); // of 4096 nearly alike
    }

    [Fact]
    public void WhatTheModelLacksIsRefused()
    {
        using var folder = new Temporary();
        using (var model = new Generator(Models.Plain))
            Assert.EndsWith(
                "takes no system prompt; put it into the first message",
                Assert.Throws<NotSupportedException>(() => new Chat(model, system: "Be kind.")).Message);
        string made = folder.Model(Models.Plain, new Dictionary<string, string> { ["no_chat"] = "the template counts messages" });
        using (var model = new Generator(made))
            Assert.Contains("chat_template.jinja: is missing", Assert.Throws<InvalidDataException>(() => new Chat(model)).Message);
        File.Delete(Path.Combine(made, "tokenizer.json"));
        using (var model = new Generator(made))
            Assert.Contains("tokenizer.json is missing", Assert.Throws<FileNotFoundException>(() => new Chat(model, raw: true)).Message);
        File.WriteAllText(Path.Combine(made, "generation_config.json"), "{\"do_sample\": true, \"top_p\": 2}");
        Assert.Contains("generation_config.json: TopP is 2, expected", Assert.Throws<InvalidDataException>(() => new Generator(made)).Message);
    }
}
