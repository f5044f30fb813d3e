using System;
using System.IO;
using System.Linq;
using System.Text;
using Tokenizers.DotNet;
using TextSample = global::Text;

/// FOLDER FILE: what the sample gives for the texts of a file of ids (tests/real/tokens.py), a line each.
static class Tokens
{
    static void Main(string[] args)
    {
        using Tokenizer tokenizer = TextSample.Load(args[0]);
        var lines = new StringBuilder();
        foreach (string line in File.ReadLines(args[1]))
        {
            string text = Encoding.UTF8.GetString(Convert.FromBase64String(line.Split('\t')[0]));
            uint[] ids = tokenizer.Encode(text);
            string whole = tokenizer.Decode(ids);
            string[] found = { Base64(text), string.Join(" ", ids), string.Join(" ", TextSample.Bare(tokenizer, text)),
                Base64(whole), Wrong(tokenizer, ids, whole).ToString() };
            lines.Append(string.Join("\t", found)).Append('\n');
        }
        Console.Write(lines);
    }

    /// At how many places a stream that begins there is not the rest of the text.
    static int Wrong(Tokenizer tokenizer, uint[] ids, string whole)
    {
        int wrong = 0;
        for (int cut = 0; cut <= ids.Length; cut++)
        {
            var writer = new StringWriter();
            var printer = new TextSample.Printer(tokenizer, ids[..cut], writer);
            foreach (uint id in ids[cut..]) printer.Add(id);
            printer.End();
            string before = tokenizer.Decode(ids[..cut]).TrimEnd('\uFFFD');
            if (whole != before + writer) wrong++;
        }
        return wrong;
    }

    static string Base64(string text) => Convert.ToBase64String(Encoding.UTF8.GetBytes(text));
}
