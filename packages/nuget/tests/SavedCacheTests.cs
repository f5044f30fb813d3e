using System;
using System.IO;
using System.Linq;
using System.Threading.Tasks;
using Xunit;

namespace QuantMoe.Tests;

public class SavedCacheTests
{
    static readonly long[] prompt = [1, 2, 3, 4, 5, 6];

    static async Task<TokenCache> Read(Generator model)
    {
        var cache = new TokenCache(model);
        await Models.All(cache.GenerateAsync(prompt, 3, Sampling.Greedy));
        return cache;
    }

    [Fact]
    public async Task SaversOfOnePathDoNotDisturbEachOther()
    {
        using var folder = new Temporary();
        using var model = new Generator(Models.Hybrid);
        string path = folder["state"];
        File.WriteAllText(path + ".partial", "another program's");
        await Task.WhenAll(Enumerable.Range(0, 6).Select(i => Task.Run(async () =>
        {
            using TokenCache cache = await Read(model);
            for (int save = 0; save < 20; save++)
            {
                cache.Save(path);
                TokenCache.Load(model, path).Dispose();
            }
        })));
        Assert.Equal(new[] { path, path + ".partial" }, Directory.GetFiles(folder.Path).Order());
        Assert.Equal("another program's", File.ReadAllText(path + ".partial"));
    }

    [Fact]
    public async Task ALinkStaysALink()
    {
        using var folder = new Temporary();
        using var model = new Generator(Models.Plain);
        using TokenCache cache = await Read(model);
        cache.Save(folder["real"]);
        byte[] before = File.ReadAllBytes(folder["real"]);
        await Models.All(cache.GenerateAsync([], 1, Sampling.Greedy));
        File.CreateSymbolicLink(folder["link"], folder["real"]);
        if (Standard)
            Assert.Contains("link is a symbolic link, expected a file", Assert.Throws<IOException>(() => cache.Save(folder["link"])).Message);
        else
        {
            cache.Save(folder["link"]);
            TokenCache.Load(model, folder["real"]).Dispose();
            Assert.NotEqual(before, File.ReadAllBytes(folder["real"]));
        }
        Assert.Equal(folder["real"], new FileInfo(folder["link"]).LinkTarget);
    }

    [Fact]
    public async Task ErrorsNameThePathAndLeaveNothing()
    {
        using var folder = new Temporary();
        using var model = new Generator(Models.Plain);
        using TokenCache cache = await Read(model);
        Assert.Contains(folder["nowhere/state"], Assert.Throws<DirectoryNotFoundException>(() => cache.Save(folder["nowhere/state"])).Message);
        Directory.CreateDirectory(folder["taken"]);
        Exception error = Assert.ThrowsAny<Exception>(() => cache.Save(folder["taken"]));
        Assert.Contains(folder["taken"], error.Message);
        Assert.Empty(Directory.GetFiles(folder.Path));
        cache.Save(folder["state"]); // and the cache goes on
        Assert.Equal(3, (await Models.All(cache.GenerateAsync([], 3))).Count);
    }

    [Fact]
    public async Task AnotherModelsFileIsRefused()
    {
        using var folder = new Temporary();
        using var model = new Generator(Models.Plain);
        using var other = new Generator(Models.Hybrid);
        using TokenCache cache = await Read(model);
        cache.Save(folder["state"]);
        Assert.Contains("saved with another model", Assert.Throws<InvalidDataException>(() => TokenCache.Load(other, folder["state"])).Message);
        byte[] bytes = File.ReadAllBytes(folder["state"]);
        bytes[^9] ^= 1;
        File.WriteAllBytes(folder["state"], bytes);
        Assert.Contains("was altered or is damaged", Assert.Throws<InvalidDataException>(() => TokenCache.Load(model, folder["state"])).Message);
    }

    [Theory, InlineData("my notes"), InlineData("a text of more than eight bytes"), InlineData("\u0002\0\0\0\0\0\0\0{}")]
    public async Task AFileThatIsNoSavedStateIsNotReplaced(string text)
    {
        using var folder = new Temporary();
        using var model = new Generator(Models.Plain);
        using TokenCache cache = await Read(model);
        File.WriteAllText(folder["notes"], text);
        Assert.Contains(
            $"{folder["notes"]}: is there, and is no saved state: expected an earlier one, or no file",
            Assert.Throws<IOException>(() => cache.Save(folder["notes"])).Message);
        Assert.Equal(text, File.ReadAllText(folder["notes"]));
        Assert.Equal(new[] { folder["notes"] }, Directory.GetFiles(folder.Path));
        File.WriteAllText(folder["notes"], "");
        cache.Save(folder["notes"]);
        TokenCache.Load(model, folder["notes"]).Dispose();
    }

    static bool Standard => typeof(TokenCache).Assembly.GetReferencedAssemblies().Any(name => name.Name == "netstandard");
}
