using System;
using System.Collections.Generic;
using System.IO;

namespace QuantMoe
{
    /// <summary>A folder's chat template. Any number of threads may use it.</summary>
    sealed class ChatTemplate : IDisposable
    {
        readonly NativeText.Handle handle;

        /// <summary>Read the default template of a folder.</summary>
        /// <exception cref="InvalidDataException">There is none, or it is damaged.</exception>
        public ChatTemplate(string folder) =>
            handle = new NativeText.Handle(NativeText.qm_template_open(NativeText.String(folder)), NativeText.qm_template_free);

        /// <summary>
        /// Return the last of a conversation's messages with all that the template writes around it: from the end of the answer
        /// before it, or from the begin, to where its answer begins.
        /// </summary>
        /// <exception cref="InvalidDataException">The template refuses the messages.</exception>
        public string Turn(string? system, IEnumerable<string> messages) => NativeText.With(messages, texts =>
            NativeText.Text(NativeText.qm_template_turn(
                handle, system == null ? null : NativeText.String(system), texts, (UIntPtr)texts.Length)));

        public void Dispose() => handle.Dispose();
    }
}
