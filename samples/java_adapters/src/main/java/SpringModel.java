import java.util.*;
import org.springframework.ai.chat.messages.*;
import org.springframework.ai.chat.metadata.*;
import org.springframework.ai.chat.model.*;
import org.springframework.ai.chat.prompt.*;
import org.springframework.ai.model.tool.ToolCallingChatOptions;
import quantmoe.*;
import reactor.core.publisher.Flux;
import reactor.core.scheduler.Schedulers;

/** Spring AI's chat model over an exported model. Text alone: tools and images are refused by name. */
public final class SpringModel implements ChatModel, AutoCloseable {
  private final Conversations conversations;

  /** Answer with a model, which the caller closes after this. */
  public SpringModel(Generator model) {
    conversations = new Conversations(model, 4);
  }

  @Override
  public ChatResponse call(Prompt prompt) {
    try (Conversations.Running running = begin(prompt)) {
      return response(running.rest(), running.info());
    }
  }

  /** Return the answer in pieces. To cancel the subscription ends it. */
  @Override
  public Flux<ChatResponse> stream(Prompt prompt) {
    return Flux.<ChatResponse>create(sink -> {
      try (Conversations.Running running = begin(prompt)) {
        sink.onCancel(running.pieces::cancel);
        for (String piece; (piece = running.next()) != null; )
          sink.next(new ChatResponse(List.of(new Generation(new AssistantMessage(piece)))));
        sink.next(response("", running.info()));
        sink.complete();
      } catch (RuntimeException error) {
        sink.error(error);
      }
    }).subscribeOn(Schedulers.boundedElastic());
  }

  private Conversations.Running begin(Prompt prompt) {
    String system = null;
    List<String> texts = new ArrayList<>();
    for (Message message : prompt.getInstructions()) {
      if (message instanceof SystemMessage && texts.isEmpty()) system = (system == null ? "" : system + "\n\n") + message.getText();
      else if (message instanceof UserMessage && texts.size() % 2 == 0 && ((UserMessage) message).getMedia().isEmpty())
        texts.add(message.getText());
      else if (message instanceof AssistantMessage && texts.size() % 2 == 1 && !((AssistantMessage) message).hasToolCalls())
        texts.add(message.getText());
      else
        throw new UnsupportedOperationException(
            "a message is " + message.getMessageType() + ", expected texts: system, then user and assistant in turn");
    }
    return conversations.begin(system, texts, options(prompt.getOptions()));
  }

  private Options options(ChatOptions asked) {
    Sampling sampling = conversations.model().sampling().copy();
    Options options = new Options().sampling(sampling);
    if (asked == null) return options;
    if (asked instanceof ToolCallingChatOptions) {
      ToolCallingChatOptions tools = (ToolCallingChatOptions) asked;
      if (!tools.getToolCallbacks().isEmpty() || !tools.getToolNames().isEmpty())
        throw new UnsupportedOperationException("toolCallbacks: describe the tools in a message");
    }
    if (asked.getTemperature() != null) sampling.temperature(asked.getTemperature());
    if (asked.getTopK() != null) sampling.topK(asked.getTopK());
    if (asked.getTopP() != null) sampling.topP(asked.getTopP());
    if (asked.getPresencePenalty() != null) sampling.presencePenalty(asked.getPresencePenalty());
    if (asked.getFrequencyPenalty() != null) sampling.frequencyPenalty(asked.getFrequencyPenalty());
    if (asked.getStopSequences() != null) options.stop(asked.getStopSequences().toArray(new String[0]));
    if (asked.getMaxTokens() != null) options.maxNewTokens(asked.getMaxTokens());
    return options;
  }

  private ChatResponse response(String text, ReplyInfo info) {
    ChatGenerationMetadata end = ChatGenerationMetadata.builder().finishReason(info.stopped() ? "stop" : "length").build();
    ChatResponseMetadata metadata = ChatResponseMetadata.builder()
        .model(conversations.model().folder())
        .usage(new DefaultUsage(info.promptTokens, info.tokens()))
        .build();
    return new ChatResponse(List.of(new Generation(new AssistantMessage(text), end)), metadata);
  }

  @Override
  public void close() {
    conversations.close();
  }
}
