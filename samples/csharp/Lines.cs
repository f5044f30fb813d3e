using System;
using System.Collections.Concurrent;
using System.Collections.Generic;
using System.Threading;

/// Lines that are typed while answers come: messages, and an empty line to end an answer.
sealed class Lines : IDisposable
{
    readonly BlockingCollection<string> messages = new BlockingCollection<string>();
    readonly object gate = new object();
    CancellationTokenSource? answer;
    bool early; // Enter was pressed before the answer began

    public Lines()
    {
        var thread = new Thread(() =>
        {
            while (Console.In.ReadLine() is string line)
                if (line != "") messages.Add(line);
                else
                    lock (gate)
                    {
                        answer?.Cancel();
                        early = answer == null;
                    }
            messages.CompleteAdding();
        });
        thread.IsBackground = true;
        thread.Start();
    }

    public IEnumerable<string> Messages()
    {
        foreach (string message in messages.GetConsumingEnumerable())
        {
            early = false;
            yield return message;
        }
    }

    /// What Enter cancels from now on.
    public CancellationTokenSource Next()
    {
        lock (gate)
        {
            answer = new CancellationTokenSource();
            if (early) answer.Cancel();
            return answer;
        }
    }

    public void Dispose()
    {
        lock (gate) answer = null;
    }
}
