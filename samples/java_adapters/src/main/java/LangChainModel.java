import dev.langchain4j.data.message.*;
import dev.langchain4j.exception.UnsupportedFeatureException;
import dev.langchain4j.model.chat.ChatModel;
import dev.langchain4j.model.chat.StreamingChatModel;
import dev.langchain4j.model.chat.request.*;
import dev.langchain4j.model.chat.response.*;
import dev.langchain4j.model.output.*;
import java.util.*;
import quantmoe.*;

/** LangChain4j's chat models over an exported model. Text alone: tools, JSON and images are refused by name. */
public final class LangChainModel implements ChatModel, AutoCloseable {
  private final Conversations conversations;

  /** Answer with a model, which the caller closes after this. */
  public LangChainModel(Generator model) {
    conversations = new Conversations(model, 4);
  }

  @Override
  public ChatResponse doChat(ChatRequest request) {
    try (Conversations.Running running = begin(request)) {
      return response(running.rest(), running.info());
    }
  }

  /** Return the model that gives answers in pieces. It is closed with this one. */
  public StreamingChatModel streaming() {
    return new StreamingChatModel() {
      @Override
      public void doChat(ChatRequest request, StreamingChatResponseHandler handler) {
        try (Conversations.Running running = begin(request)) {
          StreamingHandle handle = new StreamingHandle() {
            private volatile boolean cancelled;

            @Override
            public void cancel() {
              cancelled = true;
              running.pieces.cancel();
            }

            @Override
            public boolean isCancelled() {
              return cancelled;
            }
          };
          PartialResponseContext context = new PartialResponseContext(handle);
          for (String piece; (piece = running.next()) != null; ) handler.onPartialResponse(new PartialResponse(piece), context);
          handler.onCompleteResponse(response(running.rest(), running.info()));
        } catch (RuntimeException error) {
          handler.onError(error);
        }
      }
    };
  }

  private Conversations.Running begin(ChatRequest request) {
    String system = null;
    List<String> texts = new ArrayList<>();
    for (ChatMessage message : request.messages()) {
      if (message instanceof SystemMessage && texts.isEmpty())
        system = (system == null ? "" : system + "\n\n") + ((SystemMessage) message).text();
      else if (message instanceof UserMessage && texts.size() % 2 == 0 && ((UserMessage) message).hasSingleText())
        texts.add(((UserMessage) message).singleText());
      else if (message instanceof AiMessage && texts.size() % 2 == 1 && !((AiMessage) message).hasToolExecutionRequests())
        texts.add(((AiMessage) message).text());
      else throw new UnsupportedFeatureException("a message is " + message.type() + ", expected texts: system, then user and assistant in turn");
    }
    return conversations.begin(system, texts, options(request));
  }

  private Options options(ChatRequest request) {
    if (request.toolSpecifications() != null && !request.toolSpecifications().isEmpty())
      throw new UnsupportedFeatureException("toolSpecifications: describe the tools in a message");
    if (request.responseFormat() != null && request.responseFormat().type() == ResponseFormatType.JSON)
      throw new UnsupportedFeatureException("responseFormat: ask for JSON in a message");
    Sampling sampling = conversations.model().sampling().copy();
    if (request.temperature() != null) sampling.temperature(request.temperature());
    if (request.topK() != null) sampling.topK(request.topK());
    if (request.topP() != null) sampling.topP(request.topP());
    if (request.presencePenalty() != null) sampling.presencePenalty(request.presencePenalty());
    if (request.frequencyPenalty() != null) sampling.frequencyPenalty(request.frequencyPenalty());
    Options options = new Options().sampling(sampling).stop(request.stopSequences().toArray(new String[0]));
    if (request.maxOutputTokens() != null) options.maxNewTokens(request.maxOutputTokens());
    return options;
  }

  private ChatResponse response(String text, ReplyInfo info) {
    return ChatResponse.builder()
        .aiMessage(AiMessage.from(text))
        .modelName(conversations.model().folder())
        .tokenUsage(new TokenUsage(info.promptTokens, info.tokens()))
        .finishReason(info.stopped() ? FinishReason.STOP : FinishReason.LENGTH)
        .build();
  }

  @Override
  public void close() {
    conversations.close();
  }
}
