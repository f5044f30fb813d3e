using System;
using System.Collections.Generic;
using System.Linq;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntime.Tensors;

/// Greedy decoding of an exported f32 folder: Generate LIBRARY FOLDER COUNT ID... prints COUNT token ids.
static class Generate
{
    static int Main(string[] args)
    {
        if (args.Length < 4)
        {
            Console.Error.WriteLine("usage: Generate LIBRARY FOLDER COUNT ID...");
            return 2;
        }
        long[] ids = args.Skip(3).Select(long.Parse).ToArray();
        using var options = new SessionOptions();
        options.RegisterCustomOpLibrary(args[0]);
        using var session = new InferenceSession(args[1] + "/model.onnx", options);

        // Batch 1, no past: every dynamic dimension of a cache input after the first is the past length.
        var cache = new Dictionary<string, Tensor<float>>();
        foreach (var input in session.InputMetadata.Where(i => i.Key.StartsWith("past_key_values")))
        {
            int[] shape = input.Value.Dimensions.Select((d, n) => d >= 0 ? d : n == 0 ? 1 : 0).ToArray();
            cache[input.Key] = new DenseTensor<float>(shape);
        }
        var generated = new List<long>();
        int past = 0;
        while (generated.Count < int.Parse(args[2]))
        {
            int total = past + ids.Length;
            var feed = cache.Select(c => NamedOnnxValue.CreateFromTensor(c.Key, c.Value)).ToList();
            feed.Add(Row("input_ids", ids));
            feed.Add(Row("attention_mask", Enumerable.Repeat(1L, total)));
            feed.Add(Row("position_ids", Enumerable.Range(past, ids.Length).Select(i => (long)i)));
            using var results = session.Run(feed);
            foreach (var result in results.Where(r => r.Name.StartsWith("present")))
                cache[result.Name.Replace("present", "past_key_values")] = result.AsTensor<float>().Clone();
            past = total;
            ids = new[] { Last(results.First(r => r.Name == "logits").AsTensor<float>()) };
            generated.AddRange(ids);
        }
        Console.WriteLine(string.Join(" ", generated));
        return 0;
    }

    static NamedOnnxValue Row(string name, IEnumerable<long> values)
    {
        long[] row = values.ToArray();
        return NamedOnnxValue.CreateFromTensor(name, new DenseTensor<long>(row, new[] { 1, row.Length }));
    }

    /// The best token at the last position of logits [1, sequence, vocabulary].
    static long Last(Tensor<float> logits)
    {
        int last = logits.Dimensions[1] - 1, best = 0;
        for (int i = 1; i < logits.Dimensions[2]; i++)
            if (logits[0, last, i] > logits[0, last, best]) best = i;
        return best;
    }
}
