using System;
using System.Collections.Generic;
using System.Globalization;
using System.Linq;
using Microsoft.ML.OnnxRuntime;

/// Greedy decoding of an exported f32 folder: Generate FOLDER COUNT ID... prints up to COUNT token ids. What was read and said may
/// be loaded from a file and saved.
static class Generate
{
    static int Main(string[] args)
    {
        try
        {
            string load = "", save = "";
            for (; args.Length > 1 && args[0] is "--load-state" or "--save-state"; args = args[2..])
                if (args[0] == "--load-state") load = args[1];
                else save = args[1];
            if (args.Length < 3)
                throw new ArgumentException("usage: Generate [--load-state FILE] [--save-state FILE] FOLDER COUNT ID...");
            long[] numbers = args.Skip(1).Select(Number).ToArray();
            var quiet = new EnvironmentCreationOptions { logId = "Generate", logLevel = OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR };
            OrtEnv.CreateInstanceWithOptions(ref quiet);
            using var options = new SessionOptions();
            options.LogSeverityLevel = OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL; // what it logs is in its exceptions
            options.RegisterCustomOpLibrary(args[0] + "/libquantmoe_ort.so");
            using var session = new InferenceSession(args[0] + "/model.onnx", options);
            Console.WriteLine(string.Join(" ", Tokens(session, numbers[0], numbers[1..], load, save)));
            return 0;
        }
        catch (Exception error)
        {
            Console.Error.WriteLine(error.GetBaseException().Message);
            return 1;
        }
    }

    /// A prompt's continuation; what the file `load` has of it is not run again.
    static List<long> Tokens(InferenceSession session, long count, long[] ids, string load, string save)
    {
        var metadata = session.ModelMetadata.CustomMetadataMap;
        string[] stop = metadata.GetValueOrDefault("eos_token_id", "").Split(',');
        long context = long.Parse(metadata.GetValueOrDefault("context_length", $"{long.MaxValue}"));
        if (ids.Length >= context)
            throw new ArgumentException($"a prompt of {ids.Length} tokens leaves no room in the model's context of {context}");
        count = Math.Min(count, context - ids.Length);

        // Batch 1. Past and present are one buffer that each run writes in place, if the model takes that. Otherwise present is
        // the longer past of the next run.
        bool shares = metadata.GetValueOrDefault("past_present_share_buffer") == "true";
        Past[] pasts = session.InputNames.Where(name => name.StartsWith("past_key_values."))
            .Select(name => new Past(name, session.InputMetadata[name])).ToArray();
        string identity = metadata.GetValueOrDefault("identity", "");
        using StateFile? file = load == "" ? null : new StateFile(load, identity, pasts);
        int kept = file?.Keep(ids) ?? 0;
        var ends = file?.LoadEnds(kept) ?? new SortedDictionary<long, List<byte[]>>();
        long slots = shares ? ids.Length + count : kept;
        OrtValue[] first = pasts
            .Select(past => OrtValue.CreateAllocatedTensorValue(OrtAllocator.DefaultInstance, past.Type, past.Shape(slots))).ToArray();
        IReadOnlyList<OrtValue> cache = first;
        var read = ids[..kept].ToList();
        ids = ids[kept..];
        IDisposableReadOnlyCollection<OrtValue>? last = null; // has the cache after the first step
        try
        {
            for (int i = 0; file != null && i < pasts.Length; i++) file.Load(pasts[i], kept, first[i]);
            var generated = new List<long>();
            using var run = new RunOptions();
            using OrtIoBinding binding = session.CreateIoBinding();
            for (int past = kept; count-- > 0;)
            {
                int total = past + ids.Length;
                using OrtValue tokens = Row(ids), mask = Row(Enumerable.Repeat(1L, total));
                using OrtValue positions = Row(Enumerable.Range(past, ids.Length).Select(i => (long)i));
                binding.BindInput("input_ids", tokens);
                binding.BindInput("attention_mask", mask);
                binding.BindInput("position_ids", positions);
                for (int i = 0; i < pasts.Length; i++)
                {
                    binding.BindInput(pasts[i].Name, cache[i]);
                    if (shares) binding.BindOutput(pasts[i].Present, cache[i]);
                    else binding.BindOutputToDevice(pasts[i].Present, OrtMemoryInfo.DefaultInstance);
                }
                binding.BindOutputToDevice("logits", OrtMemoryInfo.DefaultInstance);
                var results = session.RunWithBoundResults(run, binding);
                last?.Dispose();
                cache = last = results;
                past = total;
                read.AddRange(ids);
                if (save != "" && ids.Length > 1) ends[past] = StateFile.States(pasts, cache);
                ids = new[] { Best(last[pasts.Length]) };
                generated.AddRange(ids);
                if (stop.Contains($"{ids[0]}")) break;
            }
            if (save != "") StateFile.Save(save, identity, read.ToArray(), pasts, cache, ends);
            return generated;
        }
        finally
        {
            last?.Dispose();
            foreach (var value in first) value.Dispose();
        }
    }

    static OrtValue Row(IEnumerable<long> values)
    {
        long[] row = values.ToArray();
        return OrtValue.CreateTensorValueFromMemory(row, new long[] { 1, row.Length });
    }

    /// The best token at the last position of logits [1, sequence, vocabulary].
    static long Best(OrtValue logits)
    {
        var all = logits.GetTensorDataAsSpan<float>();
        var last = all[^(int)logits.GetTensorTypeAndShape().Shape[2]..];
        int best = 0;
        for (int i = 0; i < last.Length; i++)
        {
            if (!float.IsFinite(last[i])) throw new InvalidOperationException("logits are not finite");
            if (last[i] > last[best]) best = i;
        }
        return best;
    }

    static long Number(string text) =>
        long.TryParse(text, NumberStyles.None, CultureInfo.InvariantCulture, out long number)
            ? number
            : throw new ArgumentException($"\"{text}\": expected a number from 0");
}
