import static org.junit.jupiter.api.Assertions.*;

import ai.onnxruntime.OrtLoggingLevel;
import java.io.IOException;
import java.io.OutputStream;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.util.*;
import java.util.concurrent.*;
import java.util.stream.*;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;
import quantmoe.*;

class HelperTest {
  static final long[] PROMPT = LongStream.rangeClosed(1, 12).toArray();
  static final Map<String, String> TURNS =
      Map.of("chat.begin", "Q: ", "chat.reply", "\nA:", "chat.next", "\nQ: ", "chat.system", "S: ", "chat.system_end", "\nQ: ");
  @TempDir Path temporary;

  static String folder(String name) {
    return System.getProperty(name);
  }

  /** Make a copy of a model with more metadata: a ModelProto's field 14 is a list, which may go on at the file's end. */
  String copy(String name, Map<String, String> metadata) throws IOException {
    Path made = temporary.resolve(name);
    Files.createDirectory(made);
    try (Stream<Path> files = Files.list(Path.of(folder(name)))) {
      for (Path file : (Iterable<Path>) files::iterator) Files.copy(file, made.resolve(file.getFileName()));
    }
    try (OutputStream model = Files.newOutputStream(made.resolve("model.onnx"), StandardOpenOption.APPEND)) {
      for (var entry : metadata.entrySet())
        model.write(field(0x72, joined(field(0x0a, bytes(entry.getKey())), field(0x12, bytes(entry.getValue())))));
    }
    return made.toString();
  }

  static byte[] bytes(String text) {
    return text.getBytes(StandardCharsets.UTF_8);
  }

  static byte[] field(int tag, byte[] value) {
    return joined(new byte[] {(byte) tag, (byte) (value.length & 127 | 128), (byte) (value.length >> 7)}, value);
  }

  static byte[] joined(byte[] one, byte[] other) {
    byte[] all = Arrays.copyOf(one, one.length + other.length);
    System.arraycopy(other, 0, all, one.length, other.length);
    return all;
  }

  static long[] joined(long[] one, long... other) {
    return LongStream.concat(LongStream.of(one), LongStream.of(other)).toArray();
  }

  static Options greedy(int count) {
    return Options.greedy().maxNewTokens(count);
  }

  static long[] all(Answer<Long> answer) {
    LongStream.Builder found = LongStream.builder();
    for (long id : answer) found.add(id);
    return found.build().toArray();
  }

  static String said(Answer<String> answer) {
    return StreamSupport.stream(answer.spliterator(), false).collect(Collectors.joining());
  }

  static long[] fresh(Generator model, long[] ids, int count) {
    try (TokenCache cache = new TokenCache(model)) {
      return all(cache.generate(ids, greedy(count)));
    }
  }

  @ParameterizedTest
  @ValueSource(strings = {"model", "hybrid"})
  void answersGoOn(String name) {
    try (Generator model = new Generator(folder(name)); TokenCache cache = new TokenCache(model)) {
      long[] first = all(cache.generate(PROMPT, greedy(5))), rest = all(cache.generate(new long[0], greedy(7)));
      long[] whole = fresh(model, PROMPT, 12);
      assertArrayEquals(whole, joined(first, rest));
      assertArrayEquals(joined(PROMPT, Arrays.copyOf(whole, 11)), cache.tokens());
    }
  }

  @ParameterizedTest
  @ValueSource(strings = {"model", "hybrid"})
  void longPromptsAndGrowingCachesGiveTheSameTokens(String name) {
    try (Generator model = new Generator(folder(name)); TokenCache cache = new TokenCache(model)) {
      long[] ids = LongStream.range(0, 1300).map(i -> i * 7 % 4000 + 1).toArray();
      all(cache.generate(Arrays.copyOf(ids, 100), greedy(1)));
      assertEquals(100, cache.keep(ids));
      assertArrayEquals(fresh(model, ids, 3), all(cache.generate(Arrays.copyOfRange(ids, 100, 1300), greedy(3))));
    }
  }

  @ParameterizedTest
  @ValueSource(strings = {"model", "hybrid"})
  void keepGoesBackToTheEndOfAPrompt(String name) {
    boolean hybrid = name.equals("hybrid");
    try (Generator model = new Generator(folder(name)); TokenCache cache = new TokenCache(model, true)) {
      all(cache.generate(PROMPT, greedy(6)));
      long[][] texts = {joined(PROMPT, 20, 21), PROMPT, joined(Arrays.copyOf(PROMPT, 5), 30)};
      int[] expected = hybrid ? new int[] {12, 4, 4} : new int[] {12, 11, 5};
      for (int i = 0; i < texts.length; i++) {
        int kept = cache.keep(texts[i]);
        assertEquals(expected[i], kept);
        long[] rest = Arrays.copyOfRange(texts[i], kept, texts[i].length);
        assertArrayEquals(fresh(model, texts[i], 6), all(cache.generate(rest, greedy(6))));
      }
    }
  }

  @ParameterizedTest
  @ValueSource(strings = {"model", "hybrid"})
  void cancelledGenerationLeavesACacheThatGoesOn(String name) throws Exception {
    long[] more = LongStream.range(0, 300).map(i -> i * 11 % 4000 + 1).toArray();
    int ended = 0;
    try (Generator model = new Generator(folder(name))) {
      for (int i = 0; i < 30; i++) {
        try (TokenCache cache = new TokenCache(model)) {
          all(cache.generate(PROMPT, greedy(2)));
          Answer<Long> answer = cache.generate(more, greedy(4));
          int micros = 700 * i;
          CompletableFuture<Void> cancel = CompletableFuture.runAsync(
              answer::cancel, CompletableFuture.delayedExecutor(micros, TimeUnit.MICROSECONDS));
          try {
            all(answer);
          } catch (CancellationException error) {
            ended++;
          }
          cancel.get();
          long[] ids = joined(cache.tokens(), 50, 51);
          assertEquals(ids.length - 2, cache.keep(ids));
          assertArrayEquals(fresh(model, ids, 4), all(cache.generate(new long[] {50, 51}, greedy(4))));
        }
      }
    }
    assertNotEquals(0, ended);
  }

  @ParameterizedTest
  @ValueSource(strings = {"model", "hybrid"})
  void closeDuringAnAnswerEndsItByName(String name) throws Exception {
    for (int i = 0; i < 10; i++) {
      Generator model = new Generator(folder(name));
      TokenCache cache = new TokenCache(model);
      CompletableFuture<long[]> answer = CompletableFuture.supplyAsync(() -> all(cache.generate(PROMPT, greedy(100000))));
      Thread.sleep(3 * i);
      if (i % 2 == 0) cache.close();
      model.close();
      Throwable error = assertThrows(ExecutionException.class, answer::get).getCause();
      assertInstanceOf(IllegalStateException.class, error);
      assertTrue(error.getMessage().matches("the (cache|model) is closed; .*"), error.getMessage());
      assertThrows(IllegalStateException.class, () -> cache.generate(PROMPT, greedy(1)));
      assertThrows(IllegalStateException.class, () -> cache.keep(PROMPT));
      assertThrows(IllegalStateException.class, () -> new TokenCache(model));
      assertThrows(IllegalStateException.class, model::tokenizer);
      cache.close();
      model.close();
    }
  }

  @Test
  void wrongCallsAreRefusedByName() {
    try (Generator model =
            new Generator(folder("model"), options -> options.setSessionLogLevel(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL));
        TokenCache cache = new TokenCache(model)) {
      var error = assertThrows(IllegalArgumentException.class, () -> cache.generate(new long[0], greedy(1)));
      assertEquals("the prompt has no tokens", error.getMessage());
      error = assertThrows(IllegalArgumentException.class, () -> new Sampling().topP(1.5));
      assertEquals("topP is 1.5, expected a number above 0, at most 1", error.getMessage());
      for (long id : new long[] {-1, 4096}) {
        Options penalized = greedy(1).sampling(new Sampling().repetitionPenalty(2));
        error = assertThrows(IllegalArgumentException.class, () -> cache.generate(new long[] {1, id}, penalized));
        assertEquals("token id " + id + " is outside the vocabulary, 0 to 4095", error.getMessage());
      }
      assertEquals("options is null", assertThrows(NullPointerException.class, () -> cache.generate(PROMPT, null)).getMessage());
      assertEquals("folder is null", assertThrows(NullPointerException.class, () -> new Generator(null)).getMessage());
      for (String folder : List.of("", folder("model") + "/model.onnx"))
        assertEquals((folder.isEmpty() ? "\"\"" : folder + "/model.onnx") + ": missing; expected the folder of an exported model",
            assertThrows(ModelException.class, () -> new Generator(folder)).getMessage());
      assertArrayEquals(fresh(model, PROMPT, 3), all(cache.generate(PROMPT, greedy(3))));
      Answer<Long> one = cache.generate(new long[] {1}, greedy(1));
      cache.generate(new long[] {1}, greedy(1));
      assertEquals("another answer was begun", assertThrows(IllegalStateException.class, one::next).getMessage());
      var system = assertThrows(UnsupportedOperationException.class, () -> new Chat(model, "Be kind.", false)).getMessage();
      assertTrue(system.endsWith(": the model takes no system prompt; put it into the first message"), system);
    }
  }

  @Test
  void manyThreadsShareAModel() {
    try (Generator model = new Generator(folder("model"), options -> options.setIntraOpNumThreads(1))) {
      long[] expected = fresh(model, PROMPT, 20);
      IntStream.range(0, 8).parallel().forEach(i -> assertArrayEquals(expected, fresh(model, PROMPT, 20)));
    }
  }

  static Drafts drafts(String kind) {
    return kind.equals("layer") ? Drafts.mtp(4) : Drafts.ngram(3);
  }

  @ParameterizedTest
  @CsvSource({"model,ngram", "mtp,ngram", "mtp,layer"})
  void draftsGiveTheSameTokens(String name, String kind) {
    try (Generator plain = new Generator(folder(name)); Generator model = new Generator(folder(name), options -> {}, drafts(kind))) {
      long[] ids = model.tokenizer().encode("And he said unto them, And he said unto them, And he said", true);
      long[] whole = fresh(plain, ids, 60);
      for (int count = 1; count < 20; count++) { // an answer that is left within a step
        try (TokenCache left = new TokenCache(model, true)) {
          Answer<Long> answer = left.generate(ids, greedy(60));
          long[] found = LongStream.range(0, count).map(i -> answer.next()).toArray();
          assertArrayEquals(joined(ids, Arrays.copyOf(found, count - 1)), left.tokens());
          if (count % 2 == 1) {
            assertArrayEquals(whole, joined(found, all(left.generate(new long[0], greedy(60 - count)))));
          } else {
            long[] other = joined(left.tokens(), 20, 21);
            assertEquals(other.length - 2, left.keep(other));
            assertArrayEquals(fresh(plain, other, 6), all(left.generate(new long[] {20, 21}, greedy(6))));
          }
        }
      }
      try (Chat chat = new Chat(model, null, true); Chat other = new Chat(plain, null, true)) {
        String prompt = "And he said unto them, And he said";
        assertEquals(said(other.reply(prompt, greedy(60))), said(chat.reply(prompt, greedy(60))));
        assertTrue(chat.last().accepted() > 0 && chat.last().accepted() <= chat.last().drafted());
        assertEquals(0, other.last().drafted());
        Sampling sampling = new Sampling().temperature(0.6).seed(3);
        Options options = new Options().maxNewTokens(40).sampling(sampling);
        assertEquals(said(other.reply(" And", options)), said(chat.reply(" And", options)));
      }
    }
  }

  @Test
  void closeAndCancelEndDraftedAnswers() throws Exception {
    for (int i = 0; i < 8; i++) {
      Generator model = new Generator(folder("mtp"), options -> {}, Drafts.mtp(4));
      TokenCache cache = new TokenCache(model);
      Answer<Long> tokens = cache.generate(PROMPT, greedy(100000));
      CompletableFuture<long[]> answer = CompletableFuture.supplyAsync(() -> all(tokens));
      Thread.sleep(20 + 5 * i);
      if (i % 2 == 0) tokens.cancel();
      else model.close();
      Throwable error = assertThrows(ExecutionException.class, answer::get).getCause();
      if (i % 2 == 0) {
        assertInstanceOf(CancellationException.class, error);
        long[] text = cache.tokens();
        assertArrayEquals(fresh(model, joined(text, 50), 6), goesOn(cache, text));
      } else {
        assertTrue(error.getMessage().matches("the (cache|model) is closed; .*"), error.toString());
      }
      model.close();
    }
  }

  private static long[] goesOn(TokenCache cache, long[] text) {
    assertEquals(text.length, cache.keep(joined(text, 50)));
    return all(cache.generate(new long[] {50}, greedy(6)));
  }

  @Test
  void draftsThatAModelCannotVerifyAreRefused() {
    var error = assertThrows(
        UnsupportedOperationException.class, () -> new Generator(folder("hybrid"), options -> {}, Drafts.ngram(4)));
    assertTrue(error.getMessage().endsWith(": 4 draft tokens need an export with --state-window 5"), error.getMessage());
    error = assertThrows(UnsupportedOperationException.class, () -> new Generator(folder("model"), options -> {}, Drafts.mtp(2)));
    assertTrue(error.getMessage().endsWith(": 2 draft tokens need an export with --mtp"), error.getMessage());
    assertThrows(IllegalArgumentException.class, () -> Drafts.ngram(0));
    Drafts most = Drafts.ngram(Integer.MAX_VALUE);
    String said = assertThrows(IllegalArgumentException.class, () -> new Generator(folder("model"), options -> {}, most)).getMessage();
    assertTrue(said.startsWith("most is 2147483647, expected a number from 1 to "), said);
  }

  @Test
  void textGoesOnAndStops() {
    try (Generator model = new Generator(folder("model")); Chat chat = new Chat(model); Chat other = new Chat(model)) {
      String prompt = "Then said the captain";
      long[] ids = model.tokenizer().encode(prompt, true);
      String text = said(chat.reply(prompt, greedy(24)));
      assertEquals(model.tokenizer().decode(fresh(model, ids, 24), false), text);
      assertEquals(ids.length, chat.last().promptTokens);
      assertEquals(24, chat.last().tokens());
      assertFalse(chat.last().stopped());
      String stop = text.substring(text.length() / 2, text.length() / 2 + 6);
      assertEquals(text.substring(0, text.indexOf(stop)), said(other.reply(prompt, greedy(24).stop("never", stop))));
      assertTrue(other.last().stopped());
    }
  }

  @Test
  void anAnswerThatEndsWithinACharacterGoesOn() {
    try (Generator model = new Generator(folder("model")); Chat chat = new Chat(model)) {
      long[] ids = model.tokenizer().encode("Then said", true), answer = {};
      Options one = null;
      for (long seed = 0; !model.tokenizer().decode(answer, false).equals("\uFFFD") && seed < 1000; ++seed) {
        one = new Options().maxNewTokens(1).sampling(new Sampling().temperature(1000).topK(0).seed(seed));
        try (TokenCache cache = new TokenCache(model)) {
          answer = all(cache.generate(ids, one));
        }
      }
      assertEquals("\uFFFD", said(chat.reply("Then said", one)));
      ids = joined(joined(ids, answer), model.tokenizer().encode(" the captain", false));
      assertEquals(model.tokenizer().decode(fresh(model, ids, 8), false), said(chat.reply(" the captain", greedy(8))));
      assertEquals(ids.length, chat.last().promptTokens);
    }
  }

  @ParameterizedTest
  @ValueSource(strings = {"model", "hybrid"})
  void turnsAreOnePromptOfAll(String name) throws Exception {
    try (Generator model = new Generator(copy(name, TURNS)); Chat chat = new Chat(model, "Be kind.", false)) {
      long[] ids = {};
      String before = "S: Be kind.\nQ: ";
      for (String message : List.of("Who are you?", "Whence?", "Why?")) {
        ids = joined(ids, model.tokenizer().encode(before + message + "\nA:", false));
        long[] answer = LongStream.of(fresh(model, ids, 8)).filter(id -> !model.stopTokens().contains(id)).toArray();
        assertEquals(model.tokenizer().decode(answer, false), said(chat.reply(message, greedy(8))));
        assertEquals(ids.length, chat.last().promptTokens);
        assertTrue(before.startsWith("S") || chat.last().keptTokens > 0);
        ids = joined(ids, answer);
        before = "\nQ: ";
      }
    }
  }

  @Test
  void aTemplateIsRenderedWhereThereAreNoTurns() throws Exception {
    Path folder = Path.of(copy("hybrid", Map.of("no_chat", "the template counts messages")));
    Files.writeString(folder.resolve("chat_template.jinja"), String.join("\n",
        "{%- for m in messages %}",
        "{%- set users = messages[: loop.index] | selectattr('role', 'equalto', 'user') | list | length %}",
        "{{- m.content if m.role != 'user' else '|' ~ users ~ ' ' ~ m.content ~ '\\nA:' }}",
        "{%- endfor %}"));
    try (Generator model = new Generator(folder.toString()); Chat chat = new Chat(model, "Be kind.", false)) {
      long[] ids = {};
      String[][] turns = {{"Be kind.|1 日本語 𝄞?\nA:", "日本語 𝄞?"}, {"|2 Whence?\nA:", "Whence?"}, {"|3 Why?\nA:", "Why?"}};
      for (String[] turn : turns) {
        ids = joined(ids, model.tokenizer().encode(turn[0], false));
        long[] answer = LongStream.of(fresh(model, ids, 8)).filter(id -> !model.stopTokens().contains(id)).toArray();
        assertEquals(model.tokenizer().decode(answer, false), said(chat.reply(turn[1], greedy(8))));
        assertEquals(ids.length, chat.last().promptTokens);
        ids = joined(ids, answer);
      }
      model.close();
      assertThrows(IllegalStateException.class, () -> chat.reply("Why?", greedy(1)));
    }
    Files.writeString(folder.resolve("chat_template.jinja"), "{{ raise_exception('only ' ~ 'tools') }}");
    try (Generator model = new Generator(folder.toString()); Chat chat = new Chat(model)) {
      var error = assertThrows(ModelException.class, () -> chat.reply("Why?", greedy(1)));
      assertTrue(error.getMessage().contains("chat_template.jinja: invalid operation: only tools"), error.getMessage());
    }
  }

  @ParameterizedTest
  @ValueSource(strings = {"model", "hybrid"})
  void aLoadedPromptGoesOn(String name) throws Exception {
    Path path = temporary.resolve("state");
    try (Generator model = new Generator(folder(name)); TokenCache cache = new TokenCache(model, true)) {
      assertThrows(IllegalStateException.class, () -> cache.save(path));
      all(cache.generate(PROMPT, greedy(6)));
      cache.save(path);
      assertEquals(0, Files.readAllBytes(path)[0] % 8); // tensors are aligned
      long[][] texts = {joined(cache.tokens(), 20), joined(PROMPT, 20, 21)};
      int[] expected = {17, 12};
      for (int i = 0; i < texts.length; i++) {
        try (TokenCache loaded = TokenCache.load(model, path, true)) {
          assertArrayEquals(cache.tokens(), loaded.tokens());
          int kept = loaded.keep(texts[i]);
          assertEquals(expected[i], kept);
          long[] rest = Arrays.copyOfRange(texts[i], kept, texts[i].length);
          assertArrayEquals(fresh(model, texts[i], 6), all(loaded.generate(rest, greedy(6))));
        }
      }
    }
  }

  @ParameterizedTest
  @ValueSource(strings = {"model", "hybrid"})
  void aStateThatIsSavedAfterACancelledRunIsWhole(String name) throws Exception {
    long[] more = LongStream.range(0, 300).map(i -> i * 11 % 4000 + 1).toArray();
    int ended = 0;
    try (Generator model = new Generator(folder(name))) {
      for (int i = 0; i < 20; i++) {
        try (TokenCache cache = new TokenCache(model)) {
          all(cache.generate(PROMPT, greedy(2)));
          Answer<Long> answer = cache.generate(more, greedy(4));
          CompletableFuture<Void> cancel = CompletableFuture.runAsync(
              answer::cancel, CompletableFuture.delayedExecutor(700 * i, TimeUnit.MICROSECONDS));
          try {
            all(answer);
          } catch (CancellationException error) {
            ended++;
          }
          cancel.get();
          cache.save(temporary.resolve("state"));
          try (TokenCache loaded = TokenCache.load(model, temporary.resolve("state"), false)) {
            assertArrayEquals(cache.tokens(), loaded.tokens());
            long[] expected = fresh(model, joined(cache.tokens(), 50, 51), 4);
            assertArrayEquals(expected, all(loaded.generate(new long[] {50, 51}, greedy(4))));
          }
        }
      }
    }
    assertNotEquals(0, ended);
  }

  @Test
  void saversOfOnePathDoNotDisturbEachOther() throws Exception {
    Path path = temporary.resolve("state"), other = temporary.resolve("state.partial");
    Files.writeString(other, "another program's");
    try (Generator model = new Generator(folder("hybrid"))) {
      List<CompletableFuture<Void>> savers = new ArrayList<>();
      for (int i = 0; i < 6; i++)
        savers.add(CompletableFuture.runAsync(() -> {
          try (TokenCache cache = new TokenCache(model)) {
            all(cache.generate(PROMPT, greedy(3)));
            for (int save = 0; save < 10; save++) {
              cache.save(path);
              TokenCache.load(model, path, false).close();
            }
          } catch (IOException error) {
            throw new UncheckedIOException(error);
          }
        }));
      for (CompletableFuture<Void> saver : savers) saver.get();
    }
    assertEquals("another program's", Files.readString(other));
    try (Stream<Path> files = Files.list(temporary)) {
      assertEquals(2, files.count());
    }
  }

  @Test
  void aLinkStaysALinkAndOtherFilesAreNotReplaced() throws Exception {
    Path real = temporary.resolve("real"), link = temporary.resolve("link"), notes = temporary.resolve("notes");
    try (Generator model = new Generator(folder("model")); TokenCache cache = new TokenCache(model)) {
      all(cache.generate(PROMPT, greedy(2)));
      Files.createSymbolicLink(link, Path.of("real"));
      cache.save(link);
      TokenCache.load(model, real, false).close();
      assertTrue(Files.isSymbolicLink(link));
      for (String text : List.of("my notes", "a text of more than eight bytes", "\2\0\0\0\0\0\0\0{}")) {
        Files.writeString(notes, text);
        var error = assertThrows(IOException.class, () -> cache.save(notes));
        assertEquals(notes + ": is there, and is no saved state: expected an earlier one, or no file", error.getMessage());
        assertEquals(text, Files.readString(notes));
      }
      for (Path wrong : List.of(temporary.resolve("nowhere/state"), temporary)) {
        var error = assertThrows(IOException.class, () -> cache.save(wrong));
        assertTrue(error.getMessage().startsWith(wrong + ": "), error.getMessage());
      }
      try (Stream<Path> files = Files.list(temporary)) {
        assertEquals(Set.of(real, link, notes), files.collect(Collectors.toSet()));
      }
    }
  }

  @Test
  void damagedStatesAreNamed() throws Exception {
    Path path = temporary.resolve("state");
    try (Generator model = new Generator(folder("model")); Generator hybrid = new Generator(folder("hybrid"));
        TokenCache cache = new TokenCache(model)) {
      all(cache.generate(PROMPT, greedy(2)));
      cache.save(path);
      byte[] whole = Files.readAllBytes(path), altered = whole.clone();
      altered[whole.length - 9] ^= 1;
      var error = assertThrows(ModelException.class, () -> TokenCache.load(hybrid, path, false));
      assertTrue(error.getMessage().startsWith(path + ": saved with another model"), error.getMessage());
      Map<String, byte[]> damaged = Map.of("was altered or is damaged", altered, "5 bytes, expected", Arrays.copyOf(whole, 5),
          "is the file truncated?", Arrays.copyOf(whole, 100), "is it truncated?", Arrays.copyOf(whole, whole.length - 1),
          "corrupt header", joined(new byte[] {4, 0, 0, 0, 0, 0, 0, 0}, bytes("{]  ")));
      for (var file : damaged.entrySet()) {
        Files.write(path, file.getValue());
        error = assertThrows(ModelException.class, () -> TokenCache.load(model, path, false));
        assertTrue(error.getMessage().startsWith(path + ": ") && error.getMessage().contains(file.getKey()), error.getMessage());
      }
    }
  }

  @Test
  void oldestTurnsAreDroppedWhereTheContextIsFull() throws Exception {
    Map<String, String> metadata = new HashMap<>(TURNS);
    metadata.put("context_length", "64");
    try (Generator model = new Generator(copy("hybrid", metadata)); Chat chat = new Chat(model, "Be kind.", false)) {
      for (int i = 0; i < 8; i++) {
        assertNotEquals("", said(chat.reply("And then?", greedy(12))));
        assertTrue(chat.last().promptTokens + 12 <= 64);
      }
      String large = "Then said the captain of the host. ".repeat(20);
      var error = assertThrows(IllegalArgumentException.class, () -> chat.reply(large, greedy(12)));
      assertTrue(error.getMessage().contains("do not fit into the model's context of 64 tokens"), error.getMessage());
      assertNotEquals("", said(chat.reply("And then?", greedy(12))));
    }
  }

  @Test
  void anAnswerThatIsCancelledStaysAndTheChatGoesOn() {
    try (Generator model = new Generator(folder("hybrid")); Chat chat = new Chat(model)) {
      Answer<String> answer = chat.reply("Then said the captain", greedy(1000));
      StringBuilder text = new StringBuilder();
      assertThrows(CancellationException.class, () -> {
        for (String piece : answer) if (text.append(piece).length() > 10) answer.cancel();
      });
      assertNotEquals("", said(chat.reply(" And", greedy(4))));
      assertTrue(chat.last().keptTokens > 0);
    }
  }

  @Test
  void samplingFollowsItsSeedAndItsLimits() throws Exception {
    try (Generator model = new Generator(folder("model"))) {
      class Text {
        String of(Sampling sampling) {
          try (Chat chat = new Chat(model)) {
            return said(chat.reply("The old house", new Options().maxNewTokens(16).sampling(sampling)));
          }
        }
      }
      Text text = new Text();
      String greedy = text.of(Sampling.greedy());
      assertEquals(greedy, text.of(new Sampling().topK(1)));
      assertEquals(greedy, text.of(new Sampling().topK(0).topP(1e-9)));
      assertEquals(greedy, text.of(new Sampling().topK(0).minP(1)));
      assertEquals(text.of(new Sampling().seed(7)), text.of(new Sampling().seed(7)));
      assertTrue(LongStream.range(0, 8).mapToObj(seed -> text.of(new Sampling().seed(seed))).distinct().count() > 4);
      assertNotEquals(greedy, text.of(Sampling.greedy().repetitionPenalty(1e6)));
      assertNotEquals(greedy, text.of(Sampling.greedy().presencePenalty(1e6)));
      assertNotEquals(greedy, text.of(Sampling.greedy().frequencyPenalty(1e6)));
    }
  }

  @Test
  void whatTheFolderLacksIsNamed() throws Exception {
    String folder = copy("model", Map.of("no_chat", "the template counts messages"));
    Files.delete(Path.of(folder, "tokenizer.json"));
    Files.writeString(Path.of(folder, "generation_config.json"), "{\"do_sample\": true, \"top_p\": 2}");
    try (Generator model = new Generator(folder)) {
      var error = assertThrows(ModelException.class, () -> new Chat(model));
      assertTrue(error.getMessage().contains("chat_template.jinja: is missing"), error.getMessage());
      var missing = assertThrows(ModelException.class, () -> new Chat(model, null, true));
      assertTrue(missing.getMessage().contains("tokenizer.json is missing"), missing.getMessage());
      var config = assertThrows(ModelException.class, model::sampling);
      assertTrue(config.getMessage().contains("generation_config.json: topP is 2.0, expected"), config.getMessage());
    }
  }
}
