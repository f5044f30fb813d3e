using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Text;
using System.Threading;
using System.Threading.Tasks;
using Xunit;

[assembly: CollectionBehavior(DisableTestParallelization = true)]

namespace QuantMoe.Tests;

/// <summary>The models and folders that tests use.</summary>
static class Models
{
    public static string Plain => Folder("QUANTMOE_MODEL");

    public static string Hybrid => Folder("QUANTMOE_HYBRID");

    /// <summary>The hybrid model with mtp.onnx.</summary>
    public static string Mtp => Folder("QUANTMOE_MTP");

    /// <summary>A model exported for NVIDIA GPUs.</summary>
    public static string Cuda => Folder("QUANTMOE_CUDA");

    public static readonly IReadOnlyDictionary<string, string> Turns = new Dictionary<string, string>
    {
        ["chat.begin"] = "Q: ", ["chat.reply"] = "\nA:", ["chat.next"] = "\nQ: ",
        ["chat.system"] = "S: ", ["chat.system_end"] = "\nQ: ",
    };

    public static string Of(string name) => name == "hybrid" ? Hybrid : name == "mtp" ? Mtp : Plain;

    static string Folder(string name) =>
        Environment.GetEnvironmentVariable(name) ?? throw new InvalidOperationException(name + " names no exported folder");

    public static async Task<List<T>> All<T>(IAsyncEnumerable<T> items, CancellationToken cancellationToken = default)
    {
        var found = new List<T>();
        await foreach (T item in items.WithCancellation(cancellationToken)) found.Add(item);
        return found;
    }

    /// <summary>Return tokens after a prompt, from an empty cache.</summary>
    public static async Task<List<long>> Fresh(Generator model, IReadOnlyList<long> ids, int count)
    {
        using var cache = new TokenCache(model);
        return await All(cache.GenerateAsync(ids, count, Sampling.Greedy));
    }
}

/// <summary>A temporary folder.</summary>
sealed class Temporary : IDisposable
{
    public readonly string Path = Directory.CreateTempSubdirectory("quantmoe").FullName;

    public string this[string name] => System.IO.Path.Combine(Path, name);

    public void Dispose() => Directory.Delete(Path, recursive: true);

    /// <summary>Make a copy of a model with more metadata, without its weights, which a link leads to.</summary>
    public string Model(string folder, IEnumerable<KeyValuePair<string, string>> metadata)
    {
        string made = Directory.CreateDirectory(this[Guid.NewGuid().ToString("N")]).FullName;
        foreach (string file in Directory.GetFiles(folder))
        {
            string to = System.IO.Path.Combine(made, System.IO.Path.GetFileName(file));
            if (file.EndsWith(".so")) continue;
            File.Copy(file, to);
        }
        // A ModelProto's field 14 is a list of entries: more of them may stand at the file's end.
        using FileStream model = new FileStream(System.IO.Path.Combine(made, "model.onnx"), FileMode.Append);
        foreach (var entry in metadata)
        {
            byte[] both = [.. Field(0x0a, entry.Key), .. Field(0x12, entry.Value)];
            model.Write([0x72, (byte)(both.Length & 127 | 128), (byte)(both.Length >> 7), .. both]);
        }
        return made;
    }

    static byte[] Field(byte tag, string text)
    {
        byte[] bytes = Encoding.UTF8.GetBytes(text);
        return [tag, (byte)bytes.Length, .. bytes];
    }
}
