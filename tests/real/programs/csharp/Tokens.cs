using System;
using System.IO;
using System.Linq;
using System.Text;
using QuantMoe;

/// FOLDER FILE: what the package gives for the texts of a file of ids (tests/real/languages.py), a line each.
static class Tokens
{
    static void Main(string[] args)
    {
        using var tokenizer = new TextTokenizer(args[0]);
        var lines = new StringBuilder();
        foreach (string line in File.ReadLines(args[1]))
        {
            string text = Encoding.UTF8.GetString(Convert.FromBase64String(line.Split('\t')[0]));
            long[] ids = tokenizer.Encode(text, special: true);
            string whole = tokenizer.Decode(ids);
            string[] found = { Base64(text), string.Join(" ", ids), string.Join(" ", tokenizer.Encode(text, special: false)),
                Base64(whole), Wrong(tokenizer, ids, whole).ToString() };
            lines.Append(string.Join("\t", found)).Append('\n');
        }
        Console.Write(lines);
    }

    /// At how many places a stream that begins there is not the rest of the text.
    static int Wrong(TextTokenizer tokenizer, long[] ids, string whole)
    {
        int wrong = 0;
        for (int cut = 0; cut <= ids.Length; cut++)
        {
            var stream = new TextStream(tokenizer, after: ids[..cut]);
            string rest = string.Concat(ids[cut..].Select(stream.Push)) + stream.End();
            if (whole != tokenizer.Decode(ids[..cut]).TrimEnd('\uFFFD') + rest) wrong++;
        }
        return wrong;
    }

    static string Base64(string text) => Convert.ToBase64String(Encoding.UTF8.GetBytes(text));
}
