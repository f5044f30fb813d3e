using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Runtime.InteropServices;
using System.Text;
using Microsoft.ML.OnnxRuntime;

namespace QuantMoe
{
    /// <summary>The functions of libquantmoe_text (packages/rust/text/include/quantmoe/text.h).</summary>
    static class NativeText
    {
        const string Library = "quantmoe_text";

#if NET
        // A plugin's folder is none of its host's, where .NET looks.
        static NativeText() => NativeLibrary.SetDllImportResolver(typeof(NativeText).Assembly, (name, assembly, path) =>
            name == Library ? NativeLibrary.Load(QuantMoeSessionOptions.PathOf(Library)) : IntPtr.Zero);
#endif

        [StructLayout(LayoutKind.Sequential)]
        public struct Piece // qm_text and qm_ids
        {
            public IntPtr Data;
            public UIntPtr Size;
        }

        /// <summary>Something of the library, which is freed after the last call that uses it.</summary>
        public sealed class Handle : SafeHandle
        {
            readonly Action<IntPtr> free;

            /// <exception cref="InvalidDataException">The library made nothing.</exception>
            public Handle(IntPtr made, Action<IntPtr> free) : base(Found(made), ownsHandle: true)
            {
                SetHandle(made);
                this.free = free;
            }

            public override bool IsInvalid => handle == IntPtr.Zero;

            protected override bool ReleaseHandle()
            {
                free(handle);
                return true;
            }

            static IntPtr Found(IntPtr made)
            {
                if (made == IntPtr.Zero) throw Error();
                return IntPtr.Zero;
            }
        }

        /// <summary>Return why the last call of this thread failed.</summary>
        static InvalidDataException Error() => new InvalidDataException(Read(qm_text_error()));

        /// <summary>Return a text of the library, which is freed.</summary>
        public static string Text(Piece text)
        {
            byte[] bytes = new byte[Size(text)];
            Marshal.Copy(text.Data, bytes, 0, bytes.Length);
            qm_text_free(text);
            return Encoding.UTF8.GetString(bytes);
        }

        /// <summary>Return ids of the library, which are freed.</summary>
        public static long[] Ids(Piece ids)
        {
            long[] found = new long[Size(ids)];
            Marshal.Copy(ids.Data, found, 0, found.Length);
            qm_ids_free(ids);
            return found;
        }

        static int Size(Piece piece) => piece.Data == IntPtr.Zero ? throw Error() : checked((int)piece.Size);

        /// <summary>Return a text with a zero byte at its end.</summary>
        public static byte[] String(string text) => Encoding.UTF8.GetBytes(text + "\0");

        /// <summary>Call with pointers to texts.</summary>
        public static T With<T>(IEnumerable<string> texts, Func<IntPtr[], T> call)
        {
            GCHandle[] pinned = texts.Select(text => GCHandle.Alloc(String(text), GCHandleType.Pinned)).ToArray();
            try
            {
                return call(pinned.Select(text => text.AddrOfPinnedObject()).ToArray());
            }
            finally
            {
                foreach (GCHandle text in pinned) text.Free();
            }
        }

        static string Read(IntPtr text)
        {
            int size = 0;
            while (Marshal.ReadByte(text, size) != 0) size++;
            byte[] bytes = new byte[size];
            Marshal.Copy(text, bytes, 0, size);
            return Encoding.UTF8.GetString(bytes);
        }

        [DllImport(Library, CallingConvention = CallingConvention.Cdecl)]
        static extern IntPtr qm_text_error();

        [DllImport(Library, CallingConvention = CallingConvention.Cdecl)]
        static extern void qm_text_free(Piece text);

        [DllImport(Library, CallingConvention = CallingConvention.Cdecl)]
        static extern void qm_ids_free(Piece ids);

        [DllImport(Library, CallingConvention = CallingConvention.Cdecl)]
        public static extern IntPtr qm_tokenizer_open(byte[] folder);

        [DllImport(Library, CallingConvention = CallingConvention.Cdecl)]
        public static extern void qm_tokenizer_free(IntPtr tokenizer);

        [DllImport(Library, CallingConvention = CallingConvention.Cdecl)]
        public static extern Piece qm_tokenizer_encode(Handle tokenizer, byte[] text, UIntPtr size, int special);

        [DllImport(Library, CallingConvention = CallingConvention.Cdecl)]
        public static extern Piece qm_tokenizer_decode(Handle tokenizer, long[] ids, UIntPtr size, int special);

        [DllImport(Library, CallingConvention = CallingConvention.Cdecl)]
        public static extern IntPtr qm_text_stream_new(Handle tokenizer, long[] after, UIntPtr size, IntPtr[] stop, UIntPtr stops);

        [DllImport(Library, CallingConvention = CallingConvention.Cdecl)]
        public static extern Piece qm_text_stream_push(Handle stream, long id);

        [DllImport(Library, CallingConvention = CallingConvention.Cdecl)]
        public static extern Piece qm_text_stream_end(Handle stream);

        [DllImport(Library, CallingConvention = CallingConvention.Cdecl)]
        public static extern int qm_text_stream_stopped(Handle stream);

        [DllImport(Library, CallingConvention = CallingConvention.Cdecl)]
        public static extern void qm_text_stream_free(IntPtr stream);

        [DllImport(Library, CallingConvention = CallingConvention.Cdecl)]
        public static extern IntPtr qm_template_open(byte[] folder);

        [DllImport(Library, CallingConvention = CallingConvention.Cdecl)]
        public static extern Piece qm_template_turn(Handle template, byte[]? system, IntPtr[] messages, UIntPtr count);

        [DllImport(Library, CallingConvention = CallingConvention.Cdecl)]
        public static extern void qm_template_free(IntPtr template);
    }
}
