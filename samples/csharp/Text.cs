using System;
using System.Collections.Concurrent;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Text;
using System.Text.Json.Nodes;
using System.Threading;
using Microsoft.ML.OnnxRuntime;
using Tokenizers.DotNet;

/// FOLDER COUNT TEXT goes on from a text, for up to COUNT tokens. FOLDER COUNT is a conversation: each line that is typed gets an
/// answer of up to COUNT tokens. Both print tokens as they come, until Enter is pressed.
static class Text
{
    const long Room = 4096; // tokens of a conversation: its cache is allocated as it begins

    public static void Run(string[] args)
    {
        if (args.Length is not (2 or 3)) throw new ArgumentException("usage: Generate --text FOLDER COUNT [TEXT]");
        long count = Generate.Number(args[1]);
        Console.OutputEncoding = Console.InputEncoding = new UTF8Encoding(false);
        using InferenceSession session = Generate.Open(args[0]);
        using Tokenizer tokenizer = Load(args[0]);
        if (args.Length == 3) GoOn(session, tokenizer, count, args[2]);
        else Talk(session, tokenizer, count);
    }

    /// Every token of a text, as transformers gives them: without the truncation and padding that a tokenizer.json may ask for.
    public static Tokenizer Load(string folder)
    {
        JsonObject json = JsonNode.Parse(File.ReadAllText(folder + "/tokenizer.json"))!.AsObject();
        json["truncation"] = json["padding"] = null;
        string copy = Path.GetTempFileName();
        try
        {
            File.WriteAllText(copy, json.ToJsonString());
            return new Tokenizer(vocabPath: copy);
        }
        finally
        {
            File.Delete(copy);
        }
    }

    static void GoOn(InferenceSession session, Tokenizer tokenizer, long count, string text)
    {
        bool cancelled = false;
        var run = new RunOptions(); // not disposed: the thread that reads lines has it
        Lines(line =>
        {
            if (line == null) return;
            cancelled = true;
            run.Terminate = true;
        });
        uint[] prompt = tokenizer.Encode(text);
        using var state = new State(session, prompt.Length + count);
        var printer = new Printer(tokenizer, prompt, Console.Out);
        try
        {
            state.Generate(run, count, Longs(prompt), printer.Add);
        }
        catch (OnnxRuntimeException) when (cancelled)
        {
        }
        printer.End();
        Console.WriteLine();
    }

    /// What a message is framed with is the chat template's, as the model's metadata has it: no Jinja is needed.
    static void Talk(InferenceSession session, Tokenizer tokenizer, long count)
    {
        bool enter = false;
        var messages = new BlockingCollection<string>();
        Lines(line =>
        {
            if (line == null) messages.CompleteAdding();
            else if (line == "") enter = true;
            else messages.Add(line);
        });
        using var run = new RunOptions();
        using var state = new State(session, Room);
        if (!state.Metadata.TryGetValue("chat.begin", out string? before))
            throw new ArgumentException("the model has no turns of a chat template; usage: Generate --text FOLDER COUNT TEXT");
        foreach (string message in messages.GetConsumingEnumerable())
        {
            enter = false;
            uint[] ids = Bare(tokenizer, before + message + state.Metadata["chat.reply"]);
            var printer = new Printer(tokenizer, ids, Console.Out);
            state.Generate(run, count, Longs(ids), id => printer.Add(id) && !enter);
            printer.End();
            Console.WriteLine();
            before = state.Metadata["chat.next"];
        }
    }

    /// A text's tokens without those that the tokenizer puts around any text, which a template's turns have already.
    public static uint[] Bare(Tokenizer tokenizer, string text)
    {
        uint[] around = tokenizer.Encode(""), example = tokenizer.Encode("a"), ids = tokenizer.Encode(text);
        int front = 0;
        while (front < around.Length && around[front] == example[front]) front++;
        return ids[front..^(around.Length - front)];
    }

    static long[] Longs(uint[] ids) => Array.ConvertAll(ids, id => (long)id);

    /// Hands over each line that is typed, and null at the end of the input.
    static void Lines(Action<string?> each)
    {
        var thread = new Thread(() =>
        {
            while (Console.In.ReadLine() is string line) each(line);
            each(null);
        });
        thread.IsBackground = true;
        thread.Start();
    }

    /// Prints what each token adds: a token may be a part of a character, and what it adds may depend on those before.
    public sealed class Printer
    {
        readonly Tokenizer tokenizer;
        readonly TextWriter writer;
        readonly List<uint> ids; // decoded are those from `from` on; the text of the first `given` ends with a whole character
        int from, given, shown; // characters of the decoded text that are out

        public Printer(Tokenizer tokenizer, uint[] prompt, TextWriter writer)
        {
            this.tokenizer = tokenizer;
            this.writer = writer;
            ids = prompt.ToList();
            string text = Decoded();
            shown = text.TrimEnd('\uFFFD').Length;
            given = shown == text.Length ? prompt.Length : 0;
        }

        public bool Add(long id)
        {
            ids.Add((uint)id);
            string text = Decoded(), whole = text.TrimEnd('\uFFFD'); // a last character of which more may come
            if (whole.Length <= shown) return true;
            writer.Write(whole[shown..]);
            shown = whole.Length;
            if (whole == text)
            {
                from = given;
                given = ids.Count;
                shown = Decoded().Length;
            }
            return true;
        }

        /// Prints what is left where the last character is not complete.
        public void End()
        {
            string text = Decoded();
            writer.Write(text[Math.Min(shown, text.Length)..]);
        }

        string Decoded() => tokenizer.Decode(ids.Skip(from).ToArray());
    }
}
