using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Threading;
using System.Threading.Tasks;
using Microsoft.ML.OnnxRuntime;
using Xunit;

namespace QuantMoe.Tests;

public class TokenCacheTests
{
    static readonly long[] prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];

    [Theory, InlineData("plain"), InlineData("hybrid")]
    public async Task AnswerGoesOnFromItsLastToken(string name)
    {
        using var model = new Generator(Models.Of(name));
        List<long> whole = await Models.Fresh(model, prompt, 12);
        using var cache = new TokenCache(model);
        List<long> first = await Models.All(cache.GenerateAsync(prompt, 5, Sampling.Greedy));
        List<long> rest = await Models.All(cache.GenerateAsync([], 7, Sampling.Greedy));
        Assert.Equal(whole, first.Concat(rest));
        Assert.Equal(prompt.Concat(whole).Take(prompt.Length + 11), cache.ToArray());
    }

    [Theory, InlineData("plain"), InlineData("hybrid")]
    public async Task LongPromptsAndGrowingCachesGiveTheSameTokens(string name)
    {
        using var model = new Generator(Models.Of(name));
        long[] ids = Enumerable.Range(0, 1300).Select(i => (long)(i * 7 % 4000 + 1)).ToArray();
        using var cache = new TokenCache(model);
        await Models.All(cache.GenerateAsync(ids[..100], 1, Sampling.Greedy)); // smaller than the first capacity
        Assert.Equal(100, cache.Keep(ids));
        List<long> found = await Models.All(cache.GenerateAsync(ids[100..], 3, Sampling.Greedy));
        Assert.Equal(await Models.Fresh(model, ids, 3), found);
    }

    [Theory, InlineData("plain"), InlineData("hybrid")]
    public async Task KeepGoesBackToTheEndOfAPrompt(string name)
    {
        using var model = new Generator(Models.Of(name));
        using var cache = new TokenCache(model, goesBack: true);
        await Models.All(cache.GenerateAsync(prompt, 6, Sampling.Greedy));
        foreach (long[] other in new long[][] { [.. prompt, 20, 21], prompt, [.. prompt[..5], 30] })
        {
            int kept = cache.Keep(other);
            // A hybrid model has copies of the states at the prompt's end and eight tokens before it.
            int most = Math.Min(other.Length - 1, other[5] == prompt[5] ? prompt.Length : 5);
            Assert.Equal(name == "hybrid" && most < prompt.Length ? prompt.Length - 8 : most, kept);
            List<long> found = await Models.All(cache.GenerateAsync(other[kept..], 6, Sampling.Greedy));
            Assert.Equal(await Models.Fresh(model, other, 6), found);
        }
    }

    [Theory, InlineData("plain"), InlineData("hybrid")]
    public async Task CancelledGenerationLeavesACacheThatGoesOn(string name)
    {
        using var folder = new Temporary();
        using var model = new Generator(Models.Of(name));
        long[] more = Enumerable.Range(0, 300).Select(i => (long)(i * 11 % 4000 + 1)).ToArray();
        int ended = 0;
        for (int i = 0; i < 40; i++)
        {
            using var cache = new TokenCache(model);
            await Models.All(cache.GenerateAsync(prompt, 2, Sampling.Greedy));
            using var source = new CancellationTokenSource();
            Task<List<long>> second = Models.All(cache.GenerateAsync(more, 4, Sampling.Greedy, source.Token));
            await Task.Delay(TimeSpan.FromMilliseconds(i * 0.7));
            source.Cancel();
            try
            {
                await second;
            }
            catch (OperationCanceledException error)
            {
                Assert.Equal(source.Token, error.CancellationToken);
                ended++;
            }
            cache.Save(folder["state"]);
            using TokenCache loaded = TokenCache.Load(model, folder["state"]);
            Assert.Equal(cache.ToArray(), loaded.ToArray());
            List<long> expected = await Models.Fresh(model, [.. cache.ToArray(), 50, 51], 4);
            Assert.Equal(expected, await Models.All(loaded.GenerateAsync([50, 51], 4, Sampling.Greedy)));
        }
        Assert.NotEqual(0, ended);
    }

    [Fact]
    public async Task CancelledPromptIsReadByTheNextAnswer()
    {
        using var model = new Generator(Models.Hybrid);
        using var cache = new TokenCache(model);
        using var source = new CancellationTokenSource();
        source.Cancel();
        await Assert.ThrowsAsync<OperationCanceledException>(() => Models.All(cache.GenerateAsync(prompt, 4, Sampling.Greedy, source.Token)));
        Assert.Equal(await Models.Fresh(model, [.. prompt, 50], 4), await Models.All(cache.GenerateAsync([50], 4, Sampling.Greedy)));
    }

    [Fact]
    public async Task WrongCallsAreRefusedByName()
    {
        using var model = new Generator(Models.Plain);
        using var cache = new TokenCache(model);
        ArgumentException error = await Assert.ThrowsAsync<ArgumentException>(() => Models.All(cache.GenerateAsync([])));
        Assert.Equal("the prompt has no tokens", error.Message);
        Assert.Throws<ArgumentOutOfRangeException>(() => cache.GenerateAsync(prompt, -1));
        Assert.Contains("TopP is 1.5, expected a number above 0, at most 1",
            Assert.Throws<ArgumentOutOfRangeException>(() => cache.GenerateAsync(prompt, 1, new Sampling { TopP = 1.5 })).Message);
        await using IAsyncEnumerator<long> one = cache.GenerateAsync(prompt).GetAsyncEnumerator();
        Assert.True(await one.MoveNextAsync());
        Assert.Contains("an answer is being generated", Assert.Throws<InvalidOperationException>(() => cache.Save("nowhere")).Message);
        await Assert.ThrowsAsync<InvalidOperationException>(() => Models.All(cache.GenerateAsync(prompt)));
    }

    [Fact]
    public async Task AfterAWrongIdTheCacheGoesOn()
    {
        using var model = new Generator(Models.Plain, options => options.LogSeverityLevel = OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL);
        using var cache = new TokenCache(model);
        foreach (long id in new[] { -1, 4096 })
            Assert.StartsWith($"token id {id} is outside the vocabulary, 0 to 4095", Assert.Throws<ArgumentOutOfRangeException>(
                () => cache.GenerateAsync([1, id], sampling: new Sampling { RepetitionPenalty = 2 })).Message);
        Assert.Equal(await Models.Fresh(model, prompt, 3), await Models.All(cache.GenerateAsync(prompt, 3, Sampling.Greedy)));
    }

    [Theory, InlineData("plain"), InlineData("hybrid")]
    public async Task DisposeDuringGenerationEndsItByName(string name)
    {
        for (int i = 0; i < 10; i++)
        {
            using var model = new Generator(Models.Of(name));
            var cache = new TokenCache(model);
            Task<List<long>> answer = Models.All(cache.GenerateAsync(prompt, 100000, Sampling.Greedy));
            await Task.Delay(3 * i);
            if (i % 2 == 0) cache.Dispose();
            else model.Dispose();
            await Assert.ThrowsAsync<ObjectDisposedException>(() => answer);
        }
    }

    [Fact]
    public async Task CallsAfterDisposeAreRefused()
    {
        using var model = new Generator(Models.Plain);
        var cache = new TokenCache(model);
        await Models.All(cache.GenerateAsync(prompt, 2));
        cache.Dispose();
        cache.Dispose();
        Assert.Throws<ObjectDisposedException>(() => cache.GenerateAsync(prompt));
        Assert.Throws<ObjectDisposedException>(() => cache.Save("nowhere"));
        Assert.Throws<ObjectDisposedException>(() => cache.Keep(prompt));
        model.Dispose();
        Assert.Throws<ObjectDisposedException>(() => new TokenCache(model));
        Assert.Throws<ObjectDisposedException>(() => model.Tokenizer);
    }

    [Fact]
    public async Task ManyThreadsShareAModel()
    {
        using var model = new Generator(Models.Plain, options => options.IntraOpNumThreads = 1);
        List<long> expected = await Models.Fresh(model, prompt, 20);
        foreach (List<long> found in await Task.WhenAll(Enumerable.Range(0, 8).Select(i => Task.Run(() => Models.Fresh(model, prompt, 20)))))
            Assert.Equal(expected, found);
    }
}
