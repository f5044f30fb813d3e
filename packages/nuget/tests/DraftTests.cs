using System;
using System.Collections.Generic;
using System.Linq;
using System.Threading;
using System.Threading.Tasks;
using Xunit;

namespace QuantMoe.Tests;

public class DraftTests
{
    static readonly long[] prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];

    [Theory, InlineData("plain", false), InlineData("mtp", false), InlineData("mtp", true)]
    public async Task DraftsGiveTheSameTokens(string name, bool layer)
    {
        using var plain = new Generator(Models.Of(name));
        using var model = new Generator(Models.Of(name), drafts: layer ? Drafts.Mtp() : Drafts.Ngram(3));
        long[] ids = model.Tokenizer.Encode("And he said unto them, And he said unto them, And he said", special: true);
        List<long> whole = await Models.Fresh(plain, ids, 60);
        for (int count = 1; count < 20; count++) // an answer that is left within a step
        {
            using var cache = new TokenCache(model, goesBack: true);
            var found = new List<long>();
            await foreach (long id in cache.GenerateAsync(ids, 60, Sampling.Greedy))
            {
                found.Add(id);
                Assert.Equal(ids.Concat(found).SkipLast(1), cache.ToArray());
                if (found.Count == count) break;
            }
            Assert.Equal(ids.Length + count - 1, cache.Length);
            if (count % 2 == 1)
                Assert.Equal(whole, found.Concat(await Models.All(cache.GenerateAsync([], 60 - count, Sampling.Greedy))));
            else
            {
                long[] other = [.. cache.ToArray(), 20, 21];
                Assert.Equal(other.Length - 2, cache.Keep(other));
                Assert.Equal(await Models.Fresh(plain, other, 6), await Models.All(cache.GenerateAsync([20, 21], 6, Sampling.Greedy)));
            }
        }
        using var chat = new Chat(model, raw: true);
        using var same = new Chat(plain, raw: true);
        async Task<string> Said(Chat of, string text, Sampling sampling) =>
            string.Concat(await Models.All(of.ReplyAsync(text, 60, sampling)));
        Assert.Equal(await Said(same, "And he said unto them, And he said", Sampling.Greedy),
            await Said(chat, "And he said unto them, And he said", Sampling.Greedy));
        Assert.InRange(chat.Last!.Accepted, 1, chat.Last.Drafted);
        Assert.Equal(0, same.Last!.Drafted);
        var drawn = new Sampling { Temperature = 0.6, Seed = 3 };
        Assert.Equal(await Said(same, " And", drawn), await Said(chat, " And", drawn));
    }

    [Fact]
    public async Task DisposeAndCancelEndDraftedAnswers()
    {
        for (int i = 0; i < 8; i++)
        {
            using var model = new Generator(Models.Mtp, drafts: Drafts.Mtp());
            using var cache = new TokenCache(model);
            using var source = new CancellationTokenSource();
            Task<List<long>> answer = Models.All(cache.GenerateAsync(prompt, 100000, Sampling.Greedy, source.Token));
            await Task.Delay(20 + 5 * i);
            if (i % 2 == 0)
            {
                source.Cancel();
                await Assert.ThrowsAnyAsync<OperationCanceledException>(() => answer);
                long[] text = [.. cache.ToArray(), 50];
                Assert.Equal(text.Length - 1, cache.Keep(text));
                Assert.Equal(await Models.Fresh(model, text, 6), await Models.All(cache.GenerateAsync([50], 6, Sampling.Greedy)));
            }
            else
            {
                model.Dispose();
                await Assert.ThrowsAsync<ObjectDisposedException>(() => answer);
            }
        }
    }

    [Fact]
    public void DraftsThatAModelCannotVerifyAreRefused()
    {
        Assert.EndsWith(": 4 draft tokens need an export with --state-window 5",
            Assert.Throws<NotSupportedException>(() => new Generator(Models.Hybrid, drafts: Drafts.Ngram())).Message);
        Assert.EndsWith(": 2 draft tokens need an export with --mtp",
            Assert.Throws<NotSupportedException>(() => new Generator(Models.Plain, drafts: Drafts.Mtp(2))).Message);
        Assert.Throws<ArgumentOutOfRangeException>(() => Drafts.Ngram(0));
        Assert.StartsWith($"most is {int.MaxValue}, expected a number from 1 to ",
            Assert.Throws<ArgumentOutOfRangeException>(() => new Generator(Models.Plain, drafts: Drafts.Ngram(int.MaxValue))).Message);
    }

    [Fact]
    public void AFolderWithoutAModelIsNamed()
    {
        foreach (string folder in new[] { "", System.IO.Path.Combine(Models.Plain, "model.onnx") })
            Assert.Equal((folder == "" ? "\"\"" : System.IO.Path.Combine(folder, "model.onnx")) + ": missing; expected the folder of an exported model",
                Assert.Throws<System.IO.FileNotFoundException>(() => new Generator(folder)).Message);
    }
}
