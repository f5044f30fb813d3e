using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Text;
using System.Text.Json;
using System.Threading;
using System.Threading.Tasks;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntimeGenAI;
using QuantMoe;
using Generator = Microsoft.ML.OnnxRuntimeGenAI.Generator;

/// Conversations by onnxruntime-genai: Chat FOLDER [--stop TEXT]... [--users N] [--max-new-tokens N]. Each line that you type is a
/// message, except empty lines. Ctrl-C ends the answer, Ctrl-D the program. --users gives the message to N conversations at the same time.
static class Program
{
    static async Task<int> Main(string[] args)
    {
        try
        {
            Console.OutputEncoding = Console.InputEncoding = new UTF8Encoding(false);
            if (args.Length == 0) throw new ArgumentException("usage: Chat FOLDER [--stop TEXT]... [--users N] [--max-new-tokens N]");
            await Chat(args[0], args[1..]);
            return 0;
        }
        catch (Exception error)
        {
            Console.Error.WriteLine(error.Message);
            return 1;
        }
    }

    static async Task Chat(string folder, string[] args)
    {
        int users = 1, most = 512;
        var stop = new List<string>();
        for (; args.Length > 1 && args[0] is "--stop" or "--users" or "--max-new-tokens"; args = args[2..])
            if (args[0] == "--stop") stop.Add(args[1]);
            else if (args[0] == "--users") users = Number(args);
            else most = Number(args);
        if (args.Length > 0) throw new ArgumentException($"{args[0]}: expected --stop TEXT, --users N or --max-new-tokens N");
        if (stop.Contains("")) throw new ArgumentException("--stop is empty: expected a text");
        using Model model = Open(folder);
        using var tokenizer = new TextTokenizer(folder);
        Conversation[] conversations = Enumerable.Range(0, users).Select(_ => new Conversation(model, tokenizer, folder)).ToArray();
        var cancel = new CancellationTokenSource();
        Console.CancelKeyPress += (_, pressed) =>
        {
            pressed.Cancel = true;
            cancel.Cancel();
        };
        while (Console.ReadLine() is string line)
        {
            if (line == "") continue;
            cancel = new CancellationTokenSource();
            if (users == 1)
            {
                foreach (string piece in conversations[0].Reply(line, stop, most, cancel.Token)) Console.Write(piece);
                Console.WriteLine();
                continue;
            }
            string[] answers = await Task.WhenAll(conversations.Select(one =>
                Task.Run(() => string.Concat(one.Reply(line, stop, most, cancel.Token)))));
            for (int i = 0; i < users; i++) Console.WriteLine($"{i + 1}: {answers[i]}");
        }
        foreach (Conversation one in conversations) one.Dispose();
    }

    static int Number(string[] option) => int.TryParse(option[1], out int number) && number > 0
        ? number : throw new ArgumentException($"{option[0]} {option[1]}: expected a number from 1");

    /// Load the model with the package's library; the folder's is native code of whoever exported it.
    static Model Open(string folder)
    {
        string library = QuantMoeSessionOptions.LibraryPath(), here = Directory.GetCurrentDirectory();
        var options = new { custom_ops_library = library };
        using var config = new Config(Path.GetFullPath(folder));
        config.Overlay(JsonSerializer.Serialize(new { model = new { decoder = new { session_options = options } } }));
        Directory.SetCurrentDirectory(Path.GetDirectoryName(library)!); // else onnxruntime-genai takes none but the model's folder's
        try
        {
            return new Model(config);
        }
        finally
        {
            Directory.SetCurrentDirectory(here);
        }
    }
}

/// The messages of one user. Any number of conversations share a model. One thread at a time uses a conversation.
sealed class Conversation : IDisposable
{
    readonly Model model;
    readonly TextTokenizer tokenizer;
    readonly GeneratorParams parameters;
    readonly Tokenizer? template;
    readonly List<object> messages = [];
    readonly int maxLength, unread;
    Generator generator;
    bool begun;

    public Conversation(Model model, TextTokenizer tokenizer, string folder)
    {
        this.model = model;
        this.tokenizer = tokenizer;
        parameters = new GeneratorParams(model);
        generator = new Generator(model, parameters);
        template = HasTemplate(folder) ? new Tokenizer(model) : null;
        using JsonDocument config = JsonDocument.Parse(File.ReadAllBytes(Path.Combine(folder, "genai_config.json")));
        JsonElement search = config.RootElement.GetProperty("search");
        maxLength = search.GetProperty("max_length").GetInt32();
        // genai has not run an answer's last token, and cannot go back over one token alone in a cache that grows
        unread = search.GetProperty("past_present_share_buffer").GetBoolean() ? 1 : 2;
    }

    /// The answer in pieces. The pieces that came are part of the conversation.
    public IEnumerable<string> Reply(string text, IEnumerable<string> stop, int most, CancellationToken cancelled)
    {
        object[] asked = [.. messages, new { role = "user", content = text }];
        int[] said = begun ? generator.GetSequence(0).ToArray() : [];
        int[] ids = template == null
            ? [.. said, .. Encode(text, special: !begun)]
            : Encode(template.ApplyChatTemplate(null, JsonSerializer.Serialize(asked), null, true), special: false);
        if (ids.Length >= maxLength)
            throw new ArgumentException(
                $"{ids.Length} tokens and 1 for the answer do not fit into max_length, {maxLength} tokens: begin a new conversation, " +
                "or set max_length");
        GoOn(said, ids);
        var stream = new TextStream(tokenizer, stop, ids.Select(id => (long)id));
        var answer = new StringBuilder();
        for (int i = 0; i < most && !generator.IsDone() && !cancelled.IsCancellationRequested && !stream.Stopped; i++)
        {
            generator.GenerateNextToken();
            string piece = stream.Push(generator.GetNextTokens()[0]);
            answer.Append(piece);
            yield return piece;
        }
        string rest = stream.End();
        messages.Clear();
        messages.AddRange([.. asked, new { role = "assistant", content = WithoutReasoning(answer + rest) }]);
        yield return rest;
    }

    int[] Encode(string text, bool special) => Array.ConvertAll(tokenizer.Encode(text, special), id => (int)id);

    /// Go back to the tokens with which ids begin, and run the others. C# has no snapshots: a hybrid model begins anew.
    void GoOn(int[] said, int[] ids)
    {
        int kept = Math.Min(said.AsSpan().CommonPrefixLength(ids), Math.Max(0, Math.Min(said.Length - unread, ids.Length - 1)));
        try
        {
            if (begun) generator.RewindTo((ulong)kept);
        }
        catch (OnnxRuntimeGenAIException)
        {
            generator.Dispose();
            generator = new Generator(model, parameters);
            kept = 0;
        }
        generator.AppendTokens(ids[kept..]);
        begun = true;
    }

    static bool HasTemplate(string folder)
    {
        string config = Path.Combine(folder, "tokenizer_config.json");
        return File.Exists(Path.Combine(folder, "chat_template.jinja"))
            || (File.Exists(config) && File.ReadAllText(config).Contains("\"chat_template\""));
    }

    /// The answer as the next prompt has it: Qwen3's template leaves reasoning out.
    static string WithoutReasoning(string answer) => answer.Split("</think>")[^1].TrimStart('\n');

    public void Dispose()
    {
        generator.Dispose();
        template?.Dispose();
        parameters.Dispose();
    }
}
