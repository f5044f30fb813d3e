import static org.junit.jupiter.api.Assertions.*;

import dev.langchain4j.agent.tool.ToolSpecification;
import dev.langchain4j.data.message.*;
import dev.langchain4j.exception.UnsupportedFeatureException;
import dev.langchain4j.model.chat.request.ChatRequest;
import dev.langchain4j.model.chat.response.*;
import dev.langchain4j.model.output.FinishReason;
import java.util.*;
import java.util.concurrent.*;
import java.util.stream.*;
import org.junit.jupiter.api.Test;
import org.springframework.ai.chat.prompt.*;
import quantmoe.*;

/** The chat models of samples/java_adapters. */
class AdapterTest {
  static final List<String> MESSAGES = List.of("Then said the captain", " And", " of the house");

  static Generator model() {
    return new Generator(System.getProperty("hybrid"));
  }

  /** Return the answers of a conversation of three messages, 8 tokens each. */
  static List<String> expected(Generator model) {
    try (Chat chat = new Chat(model)) {
      return MESSAGES.stream().map(message -> HelperTest.said(chat.reply(message, HelperTest.greedy(8)))).collect(Collectors.toList());
    }
  }

  static ChatRequest.Builder request(List<ChatMessage> messages) {
    return ChatRequest.builder().messages(messages).temperature(0.0).maxOutputTokens(8);
  }

  @Test
  void langChainRepeatsAConversation() {
    try (Generator model = model(); LangChainModel chat = new LangChainModel(model); LangChainModel fresh = new LangChainModel(model)) {
      List<ChatMessage> messages = new ArrayList<>();
      List<String> answers = expected(model);
      for (int i = 0; i < 3; i++) {
        messages.add(UserMessage.from(MESSAGES.get(i)));
        ChatResponse response = chat.chat(request(messages).build());
        assertEquals(answers.get(i), response.aiMessage().text());
        assertEquals(8, response.tokenUsage().outputTokenCount());
        assertEquals(FinishReason.LENGTH, response.finishReason());
        messages.add(response.aiMessage());
      }
      messages.remove(messages.size() - 1);
      assertEquals(answers.get(2), fresh.chat(request(messages).build()).aiMessage().text()); // all messages at once
      String stop = answers.get(2).substring(3, 6);
      String stopped = fresh.chat(request(messages).stopSequences(List.of(stop)).build()).aiMessage().text();
      assertEquals(answers.get(2).substring(0, answers.get(2).indexOf(stop)), stopped);
    }
  }

  @Test
  void langChainStreamsCancelsAndRefuses() throws Exception {
    try (Generator model = model(); LangChainModel chat = new LangChainModel(model)) {
      List<ChatMessage> messages = List.of(UserMessage.from(MESSAGES.get(0)));
      StringBuilder pieces = new StringBuilder();
      CompletableFuture<String> whole = new CompletableFuture<>();
      class Handler implements StreamingChatResponseHandler {
        boolean cancels;

        @Override
        public void onPartialResponse(PartialResponse piece, PartialResponseContext context) {
          pieces.append(piece.text());
          if (cancels) context.streamingHandle().cancel();
        }

        @Override
        public void onCompleteResponse(ChatResponse response) {
          whole.complete(response.aiMessage().text());
        }

        @Override
        public void onError(Throwable error) {
          whole.completeExceptionally(error);
        }
      }
      chat.streaming().chat(request(messages).build(), new Handler());
      assertEquals(expected(model).get(0), whole.get());
      assertEquals(whole.get(), pieces.toString());
      CompletableFuture<Throwable> error = new CompletableFuture<>();
      Handler cancelling = new Handler() {
        @Override
        public void onError(Throwable thrown) {
          error.complete(thrown);
        }
      };
      cancelling.cancels = true;
      chat.streaming().chat(request(messages).maxOutputTokens(100000).build(), cancelling);
      assertInstanceOf(CancellationException.class, error.get(60, TimeUnit.SECONDS));
      ChatRequest tools = request(messages).toolSpecifications(ToolSpecification.builder().name("one").build()).build();
      var refused = assertThrows(UnsupportedFeatureException.class, () -> chat.chat(tools));
      assertTrue(refused.getMessage().startsWith("toolSpecifications: "), refused.getMessage());
      ChatRequest answer = request(List.of(AiMessage.from("a"))).build();
      assertThrows(UnsupportedFeatureException.class, () -> chat.chat(answer));
      chat.close();
      assertThrows(IllegalStateException.class, () -> chat.chat(request(messages).build()));
    }
  }

  @Test
  void springRepeatsStreamsAndCancels() {
    ChatOptions options = ChatOptions.builder().temperature(0.0).maxTokens(8).build();
    try (Generator model = model(); SpringModel chat = new SpringModel(model)) {
      List<org.springframework.ai.chat.messages.Message> messages = new ArrayList<>();
      List<String> answers = expected(model);
      for (int i = 0; i < 3; i++) {
        messages.add(new org.springframework.ai.chat.messages.UserMessage(MESSAGES.get(i)));
        Prompt prompt = new Prompt(messages, options);
        var response = chat.call(prompt);
        assertEquals(answers.get(i), response.getResult().getOutput().getText());
        assertEquals(8, response.getMetadata().getUsage().getCompletionTokens());
        assertEquals("length", response.getResult().getMetadata().getFinishReason());
        String streamed = chat.stream(prompt).map(piece -> piece.getResult().getOutput().getText()).collect(Collectors.joining()).block();
        assertEquals(answers.get(i), streamed);
        messages.add(response.getResult().getOutput());
      }
      Prompt large = new Prompt(messages.subList(0, 1), ChatOptions.builder().temperature(0.0).maxTokens(100000).build());
      assertEquals(2, chat.stream(large).take(2).collectList().block().size()); // take cancels
      var error = assertThrows(IllegalArgumentException.class, () -> chat.call(new Prompt(messages)));
      assertEquals("the last message is not the user's, expected a message to answer", error.getMessage());
    }
  }
}
