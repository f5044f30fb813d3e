using System;
using System.Collections.Generic;
using System.Globalization;
using System.IO;
using System.Linq;
using System.Text;
using System.Threading;
using System.Threading.Tasks;
using Microsoft.ML.OnnxRuntime;
using QuantMoe;

/// Greedy decoding of an exported folder. Generate FOLDER COUNT ID... prints up to COUNT token ids. What was read and said may be
/// loaded from a file and saved. With --text it takes text and gives text.
static class Generate
{
    static async Task<int> Main(string[] args)
    {
        try
        {
            var quiet = new EnvironmentCreationOptions { logId = "Generate", logLevel = OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR };
            OrtEnv.CreateInstanceWithOptions(ref quiet);
            Console.OutputEncoding = Console.InputEncoding = new UTF8Encoding(false);
            if (args.Length > 0 && args[0] == "--text") await Text(args[1..]);
            else await Ids(args);
            return 0;
        }
        catch (Exception error)
        {
            Console.Error.WriteLine(error.Message);
            return 1;
        }
    }

    static async Task Ids(string[] args)
    {
        string load = "", save = "";
        var entries = new List<string[]>();
        for (; args.Length > 1 && args[0] is "--load-state" or "--save-state" or "--entry"; args = args[2..])
            if (args[0] == "--load-state") load = args[1];
            else if (args[0] == "--save-state") save = args[1];
            else if (args[1].Contains('=')) entries.Add(args[1].Split('=', 2));
            else throw new ArgumentException($"--entry {args[1]}: expected NAME=VALUE");
        if (args.Length > 0 && args[0].StartsWith("--"))
            throw new ArgumentException($"{args[0]}: expected --load-state FILE, --save-state FILE or --entry NAME=VALUE");
        if (args.Length < 3)
            throw new ArgumentException(
                "usage: Generate [--load-state FILE] [--save-state FILE] [--entry NAME=VALUE] FOLDER COUNT ID...");
        int[] numbers = args.Skip(1).Select(Number).ToArray();
        long[] ids = numbers.Skip(1).Select(id => (long)id).ToArray();
        if (save != "" && !Directory.Exists(Path.GetDirectoryName(Path.GetFullPath(save))))
            throw new DirectoryNotFoundException($"{save}: its folder is missing");
        using Generator model = Open(args[0], entries);
        using TokenCache cache = load == "" ? new TokenCache(model, goesBack: save != "") : TokenCache.Load(model, load, goesBack: save != "");
        string space = "";
        await foreach (long id in cache.GenerateAsync(ids[cache.Keep(ids)..], numbers[0], Sampling.Greedy))
        {
            Console.Write(space + id);
            space = " ";
        }
        if (space != "") Console.WriteLine(); // before the file, which may fail
        if (save != "") cache.Save(save);
    }

    /// FOLDER COUNT TEXT goes on from a text, for up to COUNT tokens. FOLDER COUNT is a conversation: each line that is typed gets
    /// an answer of up to COUNT tokens. Enter ends an answer.
    static async Task Text(string[] args)
    {
        if (args.Length is not (2 or 3)) throw new ArgumentException("usage: Generate --text FOLDER COUNT [TEXT]");
        int count = Number(args[1]);
        using Generator model = Open(args[0]);
        bool talks = args.Length == 2;
        if (talks && !model.Metadata.ContainsKey("chat.begin") && !model.Metadata.ContainsKey("no_chat"))
            throw new ArgumentException("the model has no chat template; usage: Generate --text FOLDER COUNT TEXT");
        using var chat = new Chat(model, raw: !talks);
        using var lines = new Lines();
        foreach (string message in talks ? lines.Messages() : [args[2]])
        {
            using CancellationTokenSource enter = lines.Next();
            try
            {
                await foreach (string piece in chat.ReplyAsync(message, count, Sampling.Greedy, cancellationToken: enter.Token))
                    Console.Write(piece);
            }
            catch (OperationCanceledException)
            {
            }
            Console.WriteLine();
        }
    }

    static Generator Open(string folder, IEnumerable<string[]>? entries = null) => new Generator(folder, options =>
    {
        // What ONNX Runtime logs is in its exceptions, except what the entries come to.
        options.LogSeverityLevel = entries?.Any() == true ? OrtLoggingLevel.ORT_LOGGING_LEVEL_INFO : OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL;
        foreach (string[] entry in entries ?? []) options.AddSessionConfigEntry(entry[0], entry[1]);
    });

    static int Number(string text) =>
        int.TryParse(text, NumberStyles.None, CultureInfo.InvariantCulture, out int number)
            ? number
            : throw new ArgumentException($"\"{text}\": expected a number from 0");
}
