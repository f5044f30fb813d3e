using System;
using System.Collections.Generic;
using System.Globalization;
using System.Linq;
using Microsoft.ML.OnnxRuntime;

/// Greedy decoding of an exported f32 folder: Generate FOLDER COUNT ID... prints up to COUNT token ids. What was read and said may
/// be loaded from a file and saved. With --text it takes text and gives text (Text.cs).
static class Generate
{
    static int Main(string[] args)
    {
        try
        {
            var quiet = new EnvironmentCreationOptions { logId = "Generate", logLevel = OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR };
            OrtEnv.CreateInstanceWithOptions(ref quiet);
            if (args.Length > 0 && args[0] == "--text") Text.Run(args[1..]);
            else Run(args);
            return 0;
        }
        catch (Exception error)
        {
            Console.Error.WriteLine(error.GetBaseException().Message);
            return 1;
        }
    }

    static void Run(string[] args)
    {
        string load = "", save = "";
        var entries = new Dictionary<string, string>();
        for (; args.Length > 1 && args[0] is "--load-state" or "--save-state" or "--entry"; args = args[2..])
            if (args[0] == "--load-state") load = args[1];
            else if (args[0] == "--save-state") save = args[1];
            else
            {
                string[] entry = args[1].Split('=', 2);
                entries[entry[0]] = entry[^1];
            }
        if (args.Length < 3)
            throw new ArgumentException(
                "usage: Generate [--load-state FILE] [--save-state FILE] [--entry NAME=VALUE] FOLDER COUNT ID...");
        long[] numbers = args.Skip(1).Select(Number).ToArray(), ids = numbers[1..];
        using InferenceSession session = Open(args[0], entries);
        using var state = new State(session, ids.Length + numbers[0], load, ids, saves: save != "");
        var generated = new List<long>();
        using var run = new RunOptions();
        state.Generate(run, numbers[0], ids[state.Length..], id =>
        {
            generated.Add(id);
            return true;
        });
        if (save != "") state.Save(save);
        Console.WriteLine(string.Join(" ", generated));
    }

    /// With entries of the session, which are set before the library is registered.
    public static InferenceSession Open(string folder, Dictionary<string, string>? entries = null)
    {
        using var options = new SessionOptions();
        entries ??= new Dictionary<string, string>();
        // What it logs is in its exceptions, but for what the entries come to.
        options.LogSeverityLevel =
            entries.Count == 0 ? OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL : OrtLoggingLevel.ORT_LOGGING_LEVEL_INFO;
        foreach (var entry in entries) options.AddSessionConfigEntry(entry.Key, entry.Value);
        options.RegisterQuantMoe();
        return new InferenceSession(folder + "/model.onnx", options);
    }

    public static long Number(string text) =>
        long.TryParse(text, NumberStyles.None, CultureInfo.InvariantCulture, out long number)
            ? number
            : throw new ArgumentException($"\"{text}\": expected a number from 0");
}

/// What a model has read and said, batch 1. Past and present are one buffer that each run writes in place, if the model takes
/// that. Otherwise present is the longer past of the next run.
sealed class State : IDisposable
{
    public readonly IReadOnlyDictionary<string, string> Metadata;
    const int Tail = 8;
    readonly InferenceSession session;
    readonly OrtIoBinding binding;
    readonly Past[] pasts;
    readonly bool shares, saves;
    readonly long context, room;
    readonly string identity;
    readonly OrtValue[] first;
    readonly SortedDictionary<long, List<byte[]>> ends = new SortedDictionary<long, List<byte[]>>();
    readonly List<long> read = new List<long>();
    IReadOnlyList<OrtValue> cache;
    IDisposableReadOnlyCollection<OrtValue>? last; // has the cache after the first step
    long[] unread = { }; // the last token, which no run has read

    /// Room for so many tokens, of prompts and answers together, but no more than the model's context. Of the file `load` it has
    /// what the prompt begins with; where it is to be saved, it keeps states of linear attention to go back to.
    public State(InferenceSession session, long tokens, string load = "", long[]? prompt = null, bool saves = false)
    {
        this.session = session;
        this.saves = saves;
        Metadata = session.ModelMetadata.CustomMetadataMap;
        context = long.Parse(Metadata.GetValueOrDefault("context_length", $"{long.MaxValue}"));
        room = Math.Min(tokens, context);
        shares = Metadata.GetValueOrDefault("past_present_share_buffer") == "true";
        identity = Metadata.GetValueOrDefault("identity", "");
        pasts = session.InputNames.Where(name => name.StartsWith("past_key_values."))
            .Select(name => new Past(name, session.InputMetadata[name])).ToArray();
        using StateFile? file = load == "" ? null : new StateFile(load, identity, pasts);
        int kept = file?.Keep(prompt!) ?? 0;
        cache = first = pasts.Select(past =>
            OrtValue.CreateAllocatedTensorValue(OrtAllocator.DefaultInstance, past.Type, past.Shape(shares ? room : kept))).ToArray();
        binding = session.CreateIoBinding();
        if (file == null) return;
        ends = file.LoadEnds(kept);
        read.AddRange(prompt![..kept]);
        for (int i = 0; i < pasts.Length; i++) file.Load(pasts[i], kept, first[i]);
    }

    /// How many tokens were read.
    public int Length => read.Count;

    /// Reads ids after all that was read and said before, hands over each token of the answer as it comes, and ends where that
    /// returns false. run.Terminate = true, of any thread, ends it within a step, by an OnnxRuntimeException; after it a state is
    /// of no more use.
    public void Generate(RunOptions run, long count, long[] ids, Func<long, bool> more)
    {
        string[] stop = Metadata.GetValueOrDefault("eos_token_id", "").Split(',');
        ids = unread.Concat(ids).ToArray();
        if (ids.Length == 0) throw new ArgumentException("the prompt has no tokens");
        long total = Length + ids.Length;
        if (count > 0 && total >= room)
            throw new ArgumentException($"{total} tokens and 1 for the answer do not fit into "
                + (room < context ? "a cache of " : "the model's context of ") + room + " tokens");
        count = Math.Min(count, room - total);
        // States to go back to are of the prompt's end and of a few tokens before it, for the same prompt again.
        if (count > 0 && saves && ids.Length > Tail && pasts.Any(past => past.IsState))
        {
            Step(run, ids[..^Tail]);
            ends[Length] = StateFile.States(pasts, cache);
            ids = ids[^Tail..];
        }
        while (count-- > 0)
        {
            ids = unread = new[] { Step(run, ids) };
            bool over = stop.Contains($"{ids[0]}");
            if (over) unread = new long[0]; // what follows an answer begins with it
            if (!more(ids[0]) || over) break;
        }
    }

    /// As `quantmoe generate --save-state` does.
    public void Save(string path) => StateFile.Save(path, identity, read.ToArray(), pasts, cache, ends);

    public void Dispose()
    {
        binding.Dispose();
        last?.Dispose();
        foreach (var value in first) value.Dispose();
    }

    /// Reads ids and returns the best token after them.
    long Step(RunOptions run, long[] ids)
    {
        using OrtValue tokens = Row(ids), mask = Row(Enumerable.Repeat(1L, Length + ids.Length));
        using OrtValue positions = Row(Enumerable.Range(Length, ids.Length).Select(i => (long)i));
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
        read.AddRange(ids);
        if (saves && ids.Length > 1) ends[Length] = StateFile.States(pasts, cache);
        return Best(last[pasts.Length]);
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
}
